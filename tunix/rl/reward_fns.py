"""Reward functions that are ready to use.

Each function here makes a reward function `fn(prompts, completions, **columns)`. The
result can be pickled, so that it runs in the workers of a RewardManager. Completions
are strings.

The argument `pattern` is a regular expression that finds the answer in a completion:
the first group of its last match, or the whole match if it has no group. A completion
without a match earns 0. A pattern that can backtrack without end belongs in a worker.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tunix.rl import json_schema as schemas, maths

# A number as people write it, such as 1,234.5 or -3e-2.
NUMBER = (
  r"(?:(?<![0-9])[-+])?"  # the minus of "5-3" is not a sign
  r"(?:[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?"
)


@dataclasses.dataclass(frozen=True)
class RowReward:
  """A reward function that scores each row independently.

  Attributes:
    name: name in metrics.
    score: `score(completion, reference, **options) -> float`. The reference is None if
      there is no column.
    column: name of the dataset's column of references, or None.
    options: keyword arguments of every call of `score`.
  """

  name: str
  score: Callable[..., float]
  column: str | None
  options: Mapping[str, Any]

  @property
  def __name__(self) -> str:
    return self.name

  @property
  def __signature__(self) -> inspect.Signature:
    """The signature with the column, which a RewardManager passes."""
    names = ["prompts", "completions", *([self.column] if self.column else [])]
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature([inspect.Parameter(name, kind) for name in names])

  def __call__(
    self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]
  ) -> list[float]:
    """Returns one reward per row."""
    references = columns[self.column] if self.column else [None] * len(completions)
    return [
      float(self.score(completion, reference, **self.options))
      for completion, reference in zip(completions, references)
    ]


def exact_match(
  column: str = "answer", *, pattern: str | None = None, ignore_case: bool = False
) -> RowReward:
  """Gives 1 if the answer is the column's text, except outer white space; else 0."""
  options = {"pattern": _compiled(pattern), "ignore_case": ignore_case}
  return RowReward("exact_match", _exact, column, options)


def numeric_match(
  column: str = "answer",
  *,
  pattern: str | None = NUMBER,
  absolute: float = 1e-6,
  relative: float = 0.0,
) -> RowReward:
  """Gives 1 if the last number of the completion is the column's number, else 0.

  Args:
    column: name of a column of numbers, or of texts that `rl.maths` can read. A row
      whose reference is no number fails, because the dataset is wrong.
    pattern: regular expression of the number; by default the last number counts.
    absolute, relative: largest difference that still counts as equal; the larger of
      `absolute` and `relative` times the reference applies.
  """
  if not (absolute >= 0 and relative >= 0):
    raise ValueError(
      f"absolute is {absolute} and relative is {relative}: expected numbers of at "
      "least 0"
    )
  options = {"pattern": _compiled(pattern), "absolute": absolute, "relative": relative}
  return RowReward("numeric_match", _numeric, column, options)


def maths_match(
  column: str = "answer",
  *,
  pattern: str | None = None,
  relative: float = 1e-9,
  ignore_percent: bool = False,
) -> RowReward:
  """Gives 1 if the answer has the same value as the column, else 0; see `maths.same`.

  Args:
    column: name of a column of references, in plain text or LaTeX.
    pattern: regular expression of the answer. None takes the last \\boxed{...}, or the
      whole completion if there is none.
    relative: largest relative difference of irrational values; rational values must be
      equal.
    ignore_percent: if True, "50%" is equal to 50.
  """
  options = {"relative": relative, "ignore_percent": ignore_percent}
  options |= {"pattern": _compiled(pattern)}
  return RowReward("maths_match", _maths, column, options)


def format_match(pattern: str, *, whole: bool = True) -> RowReward:
  """Gives 1 if the completion matches a regular expression, else 0.

  Args:
    pattern: regular expression; "." matches line breaks too.
    whole: if True, the whole completion without outer white space must match; if False,
      a part of it is enough.
  """
  options = {"pattern": re.compile(pattern, re.DOTALL), "whole": whole}
  return RowReward("format_match", _format, None, options)


def length(
  *, target: int | None = None, maximum: int | None = None, tokenizer: Any = None
) -> RowReward:
  """Gives a reward for the length of the completion.

  Args:
    target: length with reward 1; the reward falls by the relative distance, down to 0.
    maximum: largest length with reward 1; longer completions get 0. Exactly one of
      `target` and `maximum` is given.
    tokenizer: object with `encode(text) -> sequence` whose tokens are counted; None
      counts characters. With workers it must be picklable.

  Raises:
    ValueError: both or none of the lengths are given, or a length is below 1.
  """
  limits = {"target": target, "maximum": maximum}
  lengths = [x for x in limits.values() if x is not None]
  if len(lengths) != 1 or lengths[0] < 1:
    raise ValueError(f"target and maximum are {limits}: set one of them, to 1 or more")
  return RowReward("length", _length, None, limits | {"tokenizer": tokenizer})


def json_schema(
  schema: schemas.Schema = True, *, pattern: str | None = None
) -> RowReward:
  """Gives 1 if the answer is JSON that conforms to a schema, else 0.

  Args:
    schema: a JSON Schema, see `rl.json_schema`; by default any JSON passes.
    pattern: regular expression of the JSON text; None takes the whole completion.

  Raises:
    ValueError: the schema has a keyword that cannot be checked.
  """
  schemas.check_schema(schema)
  options = {"schema": schema, "pattern": _compiled(pattern)}
  return RowReward("json_schema", _json, None, options)


def _compiled(pattern: str | None) -> re.Pattern[str] | None:
  return None if pattern is None else re.compile(pattern, re.DOTALL)


def _answer(text: str, pattern: re.Pattern[str] | None) -> str | None:
  """Returns the answer that `pattern` finds; the whole text if it is None."""
  if pattern is None:
    return text
  last = None
  for match in pattern.finditer(text):
    last = match
  if last is None:
    return None
  return last[1] if pattern.groups else last[0]


def _exact(
  completion: str, reference: Any, *, pattern: re.Pattern[str] | None, ignore_case: bool
) -> float:
  answer = _answer(completion, pattern)
  if answer is None:
    return 0.0
  sides = [answer.strip(), str(reference).strip()]
  if ignore_case:
    sides = [side.casefold() for side in sides]
  return float(sides[0] == sides[1])


def _numeric(
  completion: str,
  reference: Any,
  *,
  pattern: re.Pattern[str] | None,
  absolute: float,
  relative: float,
) -> float:
  expected = float(maths.evaluate(str(reference)))
  answer = _answer(completion, pattern)
  try:
    value = float(maths.evaluate(answer or ""))
  except (maths.NotANumber, OverflowError):
    return 0.0
  allowed = max(absolute, relative * abs(expected))
  return float(abs(value - expected) <= allowed)


def _maths(
  completion: str, reference: Any, *, pattern: re.Pattern[str] | None, **options: Any
) -> float:
  answer = _answer(completion, pattern)
  return float(answer is not None and maths.same(answer, str(reference), **options))


def _format(
  completion: str, _: None, *, pattern: re.Pattern[str], whole: bool
) -> float:
  text = completion.strip()
  return float((pattern.fullmatch(text) if whole else pattern.search(text)) is not None)


def _length(
  completion: str, _: None, *, target: int | None, maximum: int | None, tokenizer: Any
) -> float:
  count = len(completion if tokenizer is None else tokenizer.encode(completion))
  if target is None:
    return float(count <= (maximum or 0))
  return max(0.0, 1.0 - abs(count - target) / target)


def _json(
  completion: str, _: None, *, schema: schemas.Schema, pattern: re.Pattern[str] | None
) -> float:
  answer = _answer(completion, pattern)
  try:
    value = schemas.parse(answer or "")
  except ValueError:
    return 0.0
  return float(schemas.matches(value, schema))
