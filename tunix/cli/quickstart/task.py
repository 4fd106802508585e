"""What the quickstart teaches: sums, answered in brackets.

    3+8+5=     [16]

An answer can be checked without a second model, so it can be rewarded: by the reward
functions of a configuration (`REWARDS`), and here for the report.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from typing import Any

TERMS = 3
ALPHABET = "0123456789+=[]"
# What `tunix train` rewards: the right number in the right form, and a little for the
# form alone, which shows a model that says anything else where to go.
REWARDS = (
  r"exact_match(column='answer', pattern='^\\[([0-9]+)\\]$')",
  r"format_match('\\[[0-9]+\\]')",
)
WEIGHTS = (1.0, 0.1)
RIGHT = 1.0  # an answer with this reward is right

_ANSWER = re.compile(r"\[([0-9]+)\]")

Record = dict[str, Any]


def problems(seed: int, held_out: int) -> tuple[list[Record], list[Record]]:
  """All sums of three digits, shuffled: those to learn from, and those held out.

  Returns: records {"prompt", "response", "answer"}.
  """
  sums = list(itertools.product(range(10), repeat=TERMS))
  random.Random(seed).shuffle(sums)
  records = [_record(terms) for terms in sums]
  return records[held_out:], records[:held_out]


def _record(terms: Sequence[int]) -> Record:
  total = sum(terms)
  return {
    "prompt": "+".join(map(str, terms)) + "=",
    "response": f"[{total}]",
    "answer": str(total),
  }


def in_form(text: str) -> bool:
  """Whether an answer is a number in brackets and nothing else."""
  return _ANSWER.fullmatch(text) is not None


def is_right(record: Record, text: str) -> bool:
  """Whether an answer is the right one, in the right form."""
  return text == record["response"]
