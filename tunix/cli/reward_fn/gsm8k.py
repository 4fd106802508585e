"""Rewards for GSM8K with reasoning and answer in tags.

The expected completion is `<reasoning>...</reasoning><answer>...</answer>`; the column
`answer` of the dataset holds the number. The functions reward each tag, the whole form,
a number between the answer tags, and the right number, so a model learns one after the
other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tunix.rl.reward import functions as reward_fns, maths

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
_INSIDE = r"<answer>((?:(?!<answer>).)*?)</answer>"
_FORM = (
  r"<reasoning>(?:(?!</?reasoning>).)*</reasoning>\s*"
  r"<answer>(?:(?!</?answer>).)*</answer>"
)
_whole_form = reward_fns.format_match(_FORM)
_same_number = reward_fns.numeric_match(pattern=_INSIDE)
_first_number = re.compile(rf"<answer>[^<0-9.+{maths.MINUSES}-]*({reward_fns.NUMBER})")


def match_format_exactly(
  prompts: Sequence[Any], completions: Sequence[str]
) -> list[float]:
  """Returns 3 for a completion of exactly the expected form, else 0."""
  return [3.0 * x for x in _whole_form(prompts, completions)]


def match_format_approximately(
  prompts: Sequence[Any], completions: Sequence[str]
) -> list[float]:
  """Returns -2 to 2: 0.5 for each tag that occurs exactly once, -0.5 for the others."""
  return [
    sum(0.5 if text.count(tag) == 1 else -0.5 for tag in TAGS) for text in completions
  ]


def check_answer(
  prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[Any]
) -> list[float]:
  """Scores the text between the answer tags.

  The reward is 3 for the right number, 0.5 within 10 % of it, 0.25 within 20 %, -1 for
  another number or for text, and 0 without the tags.
  """
  return [_graded(text, right) for text, right in zip(completions, answer)]


def check_numbers(
  prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[Any]
) -> list[float]:
  """Returns 1.5 if the first number after `<answer>` is right, else 0."""
  rewards = []
  for text, right in zip(completions, answer):
    match = _first_number.search(text)
    answer_text = f"<answer>{match[1]}</answer>" if match else ""
    rewards.append(1.5 * _same_number([None], [answer_text], answer=[right])[0])
  return rewards


def _graded(text: str, right: object) -> float:
  if _same_number([None], [text], answer=[right])[0]:
    return 3.0
  inside = re.findall(_INSIDE, text, re.DOTALL)
  if not inside:
    return 0.0
  expected = float(maths.evaluate(str(right)))
  try:
    error = abs(float(maths.evaluate(inside[-1])) - expected) / (abs(expected) or 1.0)
  except (maths.NotANumber, OverflowError):
    return -1.0
  return 0.5 if error <= 0.1 else 0.25 if error <= 0.2 else -1.0
