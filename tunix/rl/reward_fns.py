"""Ready reward functions.

Each call here makes a reward function `fn(prompts, completions, **columns)` that can be
pickled, so that it runs in the workers of a RewardManager. Completions are strings.

`pattern`, where there is one, says where the answer stands in a completion: a regular
expression, of whose last match the first group (or all of it) is the answer. A
completion without one earns 0. Give patterns that cannot backtrack for ever, or run
the function in a worker.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tunix.rl import json_schema as schemas, maths

# A number as people write it: 1,234.5 or -3e-2.
NUMBER = (
  r"(?:(?<![0-9])[-+])?"  # in 5-3 it is no sign
  r"(?:[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?"
)


@dataclasses.dataclass(frozen=True)
class RowReward:
  """A reward function over rows that are scored one by one.

  Attributes:
    name: for metrics.
    score: `score(completion, reference, **options) -> float`; the reference is None
      without a column.
    column: the dataset's column of references, or None.
    options: passed on to every score.
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
    """Names the column, so that a manager passes it or says that it is missing."""
    names = ["prompts", "completions", *([self.column] if self.column else [])]
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature([inspect.Parameter(name, kind) for name in names])

  def __call__(
    self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]
  ) -> list[float]:
    """One reward a row."""
    references = columns[self.column] if self.column else [None] * len(completions)
    return [
      float(self.score(completion, reference, **self.options))
      for completion, reference in zip(completions, references)
    ]


def exact_match(
  column: str = "answer", *, pattern: str | None = None, ignore_case: bool = False
) -> RowReward:
  """1 if the answer is the column's text, white space at the ends aside; else 0."""
  options = {"pattern": _compiled(pattern), "ignore_case": ignore_case}
  return RowReward("exact_match", _exact, column, options)


def numeric_match(
  column: str = "answer",
  *,
  pattern: str | None = NUMBER,
  absolute: float = 1e-6,
  relative: float = 0.0,
) -> RowReward:
  """1 if the completion's last number is the column's; else 0.

  Args:
    column: numbers, or texts that `rl.maths` can read. A row whose reference is no
      number fails: it is the dataset's mistake.
    pattern: where the number stands; the last one of the completion by default.
    absolute, relative: how far off the number may be, whichever allows more; relative
      to the reference.
  """
  if not (absolute >= 0 and relative >= 0):
    raise ValueError(
      f"absolute is {absolute} and relative {relative}; tolerances are 0 or more"
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
  """1 if the answer has the column's value, as `rl.maths.same` sees it; else 0.

  Args:
    column: references, in plain text or LaTeX.
    pattern: where the answer stands. None: in the last \\boxed{...}, and without one
      the whole completion is the answer.
    relative: how far irrational values may differ; rational ones must be equal.
    ignore_percent: "50%" is also 50.
  """
  options = {"relative": relative, "ignore_percent": ignore_percent}
  options |= {"pattern": _compiled(pattern)}
  return RowReward("maths_match", _maths, column, options)


def format_match(pattern: str, *, whole: bool = True) -> RowReward:
  """1 if the completion has the form of a regular expression; else 0.

  Args:
    pattern: "." matches line breaks too.
    whole: the whole completion must match, white space at the ends aside; otherwise
      any part of it.
  """
  options = {"pattern": re.compile(pattern, re.DOTALL), "whole": whole}
  return RowReward("format_match", _format, None, options)


def length(
  *, target: int | None = None, maximum: int | None = None, tokenizer: Any = None
) -> RowReward:
  """A reward for the completion's length.

  Args:
    target: 1 at this length, and less by the relative distance from it, down to 0.
    maximum: 1 up to this length, 0 beyond. Exactly one of the two is given.
    tokenizer: what lengths are counted in: its tokens (an object with
      `encode(text) -> sequence`), or characters without one. With workers it must be
      possible to pickle it.

  Raises:
    ValueError: both or none given, or a length below 1.
  """
  limits = {"target": target, "maximum": maximum}
  lengths = [x for x in limits.values() if x is not None]
  if len(lengths) != 1 or lengths[0] < 1:
    raise ValueError(f"give one of target and maximum, 1 or more; they are {limits}")
  return RowReward("length", _length, None, limits | {"tokenizer": tokenizer})


def json_schema(
  schema: schemas.Schema = True, *, pattern: str | None = None
) -> RowReward:
  """1 if the answer is JSON that conforms to a schema; else 0.

  Args:
    schema: the common keywords of JSON Schema (see `rl.json_schema`); any JSON passes
      by default.
    pattern: where the JSON stands; the whole completion is JSON if None.

  Raises:
    ValueError: a keyword that is not checked.
  """
  schemas.check_schema(schema)
  options = {"schema": schema, "pattern": _compiled(pattern)}
  return RowReward("json_schema", _json, None, options)


def _compiled(pattern: str | None) -> re.Pattern[str] | None:
  return None if pattern is None else re.compile(pattern, re.DOTALL)


def _answer(text: str, pattern: re.Pattern[str] | None) -> str | None:
  """What the last match of the pattern holds; all of the text without a pattern."""
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
