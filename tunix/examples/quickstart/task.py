"""What the quickstart teaches: sums, answered in brackets.

    3+8+5=     [16]

An answer can be checked without a second model, so it can be rewarded: by the reward
functions of a configuration (`REWARDS`), and here for the report. Characters are the
tokens, so there is nothing to download.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.utils import io

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

# File: fields. "answer" is for the reward alone, which has no use for the brackets.
_FILES = {"sft": ("prompt", "response"), "prompts": ("prompt", "answer")}
_SPECIAL = ("<pad>", "<begin>", "<end>", "<unknown>")

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuickstartData:
  """The sums, and the folder of their files.

    sft.jsonl, sft_eval.jsonl           {"prompt", "response"}
    prompts.jsonl, prompts_eval.jsonl   {"prompt", "answer"}

  Attributes:
    folder: where the files lie.
    train: records {"prompt", "response", "answer"} to learn from.
    held_out: records that nothing is trained on, in the files named eval.
  """

  folder: pathlib.Path
  train: list[Record]
  held_out: list[Record]

  def path(self, name: str) -> pathlib.Path:
    """The file of that name."""
    return self.folder / f"{name}.jsonl"


def problems(seed: int, held_out: int) -> tuple[list[Record], list[Record]]:
  """All sums of three digits, shuffled: those to learn from, and those held out.

  Returns: records {"prompt", "response", "answer"}.
  """
  sums = list(itertools.product(range(10), repeat=TERMS))
  random.Random(seed).shuffle(sums)
  records = [_record(terms) for terms in sums]
  return records[held_out:], records[:held_out]


def _record(terms: Sequence[int]) -> Record:
  answer = str(sum(terms))
  prompt = "+".join(map(str, terms)) + "="
  return {"prompt": prompt, "response": f"[{answer}]", "answer": answer}


def build_data(folder: pathlib.Path, *, seed: int, held_out: int) -> QuickstartData:
  """Writes the four files.

  Args:
    folder: where to; made if it is not there.
    seed: another seed holds other sums out.
    held_out: how many.

  Raises:
    OSError: the folder cannot be written.
  """
  train, rest = problems(seed, held_out)
  data = QuickstartData(folder=folder, train=train, held_out=rest)
  for name, fields in _FILES.items():
    for suffix, records in (("", train), ("_eval", rest)):
      rows = ({field: record[field] for field in fields} for record in records)
      write_jsonl(data.path(name + suffix), rows)
  return data


def write_jsonl(path: pathlib.Path, records: Iterable[Mapping[str, Any]]) -> None:
  """One JSON object a line."""
  io.write_atomic(path, "".join(json.dumps(r) + "\n" for r in records).encode())


def make_tokenizer() -> TokenizerAdapter:
  """Every character of the task is a token."""
  import tokenizers
  from tokenizers import decoders, models

  words = [*_SPECIAL, *ALPHABET]
  pad, begin, end, unknown = _SPECIAL
  rust = tokenizers.Tokenizer(
    models.BPE({word: i for i, word in enumerate(words)}, [], unk_token=unknown)
  )
  rust.add_special_tokens(list(_SPECIAL))
  rust.decoder = decoders.Fuse()
  return TokenizerAdapter(rust, bos_token=begin, eos_token=end, pad_token=pad)


def is_right(record: Record, text: str) -> bool:
  """Whether an answer is the right one, in the right form."""
  return text == record["response"]
