"""Reward functions that are ready to use.

Each function here makes a reward function `fn(prompts, completions, **columns)`. The
result can be pickled, so that it runs in the workers of a RewardManager. Completions
are strings.

The argument `pattern` is a regular expression that finds the answer in a completion:
the first group of its last match, or the whole match if it has no group. A completion
without a match earns 0. A pattern that can backtrack without end belongs in a worker.

The argument `reasoning` says what happens to the reasoning of a completion, which ends
with `</think>`. With "drop", a function reads the text after the last `</think>`. If
the completion has a `<think>` that is never closed, it has no answer and earns 0. With
"keep", a function reads the whole completion. The default is "drop" for functions that
compare an answer, and "keep" for `format_match` and `length`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from tunix.rl.reward import json_schema as schemas, maths

# A number as people write it, such as 1,234.5 or -3e-2.
_SIGN = f"[-+{maths.MINUSES}]"
NUMBER = (
  rf"(?:(?<![0-9]){_SIGN})?"  # the minus of "5-3" is not a sign
  rf"(?:[0-9]+(?:,[0-9]{{3}})*(?:\.[0-9]+)?|\.[0-9]+)(?:[eE]{_SIGN}?[0-9]{{1,3}})?"
)

Reasoning = Literal["drop", "keep"]
_REASONING = ("drop", "keep")


def after_reasoning(completion: str) -> str | None:
  """Returns the text after the last `</think>`; the whole text if there is none.

  Reward functions of your own call it before they compare a text.

  Returns:
    The text of the answer; None if a `<think>` is not closed.
  """
  answer = completion.rpartition("</think>")[2]
  return None if "<think>" in answer else answer


@dataclasses.dataclass(frozen=True)
class RowReward:
  """A reward function that scores each row independently.

  Attributes:
    name: name in metrics.
    score: `score(completion, reference, **options) -> float`. The reference is None if
      there is no column.
    column: name of the dataset's column of references, or None.
    options: keyword arguments of every call of `score`.
    reasoning: "drop" scores the text after the reasoning, and gives 0 to a completion
      whose reasoning is not closed. "keep" scores the whole completion.

  Raises:
    ValueError: `reasoning` is neither "drop" nor "keep".
  """

  name: str
  score: Callable[..., float]
  column: str | None
  options: Mapping[str, Any]
  reasoning: Reasoning = "keep"

  def __post_init__(self):
    if self.reasoning not in _REASONING:
      raise ValueError(
        f"reasoning is {self.reasoning!r}; expected 'drop' or 'keep'. Give 'drop' to "
        "score the text after </think>"
      )

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
    drops = self.reasoning == "drop"
    texts = [after_reasoning(text) if drops else text for text in completions]
    return [
      0.0 if text is None else float(self.score(text, reference, **self.options))
      for text, reference in zip(texts, references)
    ]


def exact_match(
  column: str = "answer",
  *,
  pattern: str | None = None,
  ignore_case: bool = False,
  reasoning: Reasoning = "drop",
) -> RowReward:
  """Gives 1 if the answer is the column's text, except outer white space; else 0.

  Args:
    column: name of the column of references.
    pattern: regular expression of the answer; None takes the whole text.
    ignore_case: if True, upper and lower case are equal.
    reasoning: "drop" reads the text after `</think>`; "keep" the whole completion.
  """
  options = {"pattern": _compiled(pattern), "ignore_case": ignore_case}
  return RowReward("exact_match", _exact, column, options, reasoning)


def numeric_match(
  column: str = "answer",
  *,
  pattern: str | None = NUMBER,
  absolute: float = 1e-6,
  relative: float = 0.0,
  reasoning: Reasoning = "drop",
) -> RowReward:
  """Gives 1 if the last number of the completion is the column's number, else 0.

  Args:
    column: name of a column of numbers, or of texts that `rl.maths` can read. A row
      whose reference is no number fails, because the dataset is wrong.
    pattern: regular expression of the number; by default the last number counts.
    absolute, relative: largest difference that still counts as equal; the larger of
      `absolute` and `relative` times the reference applies.
    reasoning: "drop" reads the text after `</think>`, so that a number in reasoning
      that the model did not finish earns nothing; "keep" the whole completion.
  """
  if not (absolute >= 0 and relative >= 0):
    raise ValueError(
      f"absolute is {absolute} and relative is {relative}: expected numbers of at "
      "least 0"
    )
  options = {"pattern": _compiled(pattern), "absolute": absolute, "relative": relative}
  return RowReward("numeric_match", _numeric, column, options, reasoning)


def maths_match(
  column: str = "answer",
  *,
  pattern: str | None = None,
  relative: float = 1e-9,
  ignore_percent: bool = False,
  reasoning: Reasoning = "drop",
) -> RowReward:
  """Gives 1 if the answer has the same value as the column, else 0; see `maths.same`.

  Args:
    column: name of a column of references, in plain text or LaTeX.
    pattern: regular expression of the answer. None takes the last \\boxed{...}, or the
      whole completion if there is none.
    relative: largest relative difference of irrational values; rational values must be
      equal.
    ignore_percent: if True, "50%" is equal to 50.
    reasoning: "drop" reads the text after `</think>`; "keep" the whole completion.
  """
  options = {"relative": relative, "ignore_percent": ignore_percent}
  options |= {"pattern": _compiled(pattern)}
  return RowReward("maths_match", _maths, column, options, reasoning)


def format_match(
  pattern: str, *, whole: bool = True, reasoning: Reasoning = "keep"
) -> RowReward:
  """Gives 1 if the completion matches a regular expression, else 0.

  Args:
    pattern: regular expression; "." matches line breaks too.
    whole: if True, the whole completion without outer white space must match; if False,
      a part of it is enough.
    reasoning: "keep" matches the whole completion, for patterns of the reasoning such
      as `<think>.+</think>.+`; "drop" the text after `</think>`.
  """
  options = {"pattern": re.compile(pattern, re.DOTALL), "whole": whole}
  return RowReward("format_match", _format, None, options, reasoning)


def length(
  *,
  target: int | None = None,
  maximum: int | None = None,
  tokenizer: object = None,
  reasoning: Reasoning = "keep",
) -> RowReward:
  """Gives a reward for the length of the completion.

  Args:
    target: length with reward 1; the reward falls by the relative distance, down to 0.
    maximum: largest length with reward 1; longer completions get 0. Exactly one of
      `target` and `maximum` is given.
    tokenizer: object with `encode(text) -> sequence` whose tokens are counted; None
      counts characters. With workers it must be picklable.
    reasoning: "keep" counts the whole completion; "drop" the text after `</think>`.

  Raises:
    ValueError: both or none of the lengths are given, or a length is below 1.
  """
  limits = {"target": target, "maximum": maximum}
  lengths = [x for x in limits.values() if x is not None]
  if len(lengths) != 1 or lengths[0] < 1:
    raise ValueError(f"target and maximum are {limits}: set one of them, to 1 or more")
  options = limits | {"tokenizer": tokenizer}
  return RowReward("length", _length, None, options, reasoning)


def json_schema(
  schema: schemas.Schema = True,
  *,
  pattern: str | None = None,
  reasoning: Reasoning = "drop",
) -> RowReward:
  """Gives 1 if the answer is JSON that conforms to a schema, else 0.

  Args:
    schema: a JSON Schema, see `rl.json_schema`; by default any JSON passes.
    pattern: regular expression of the JSON text; None takes the whole text.
    reasoning: "drop" reads the text after `</think>`; "keep" the whole completion.

  Raises:
    ValueError: the schema has a keyword that cannot be checked.
  """
  schemas.check_schema(schema)
  options = {"schema": schema, "pattern": _compiled(pattern)}
  return RowReward("json_schema", _json, None, options, reasoning)


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
  completion: str,
  reference: object,
  *,
  pattern: re.Pattern[str] | None,
  ignore_case: bool,
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
  reference: object,
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
  completion: str, reference: object, *, pattern: re.Pattern[str] | None, **options: Any
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
