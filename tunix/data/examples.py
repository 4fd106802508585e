"""One training example, and what happens to it when it is too long."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import numpy as np

Overlong = Literal["error", "truncate", "drop"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
  """Tokens of one record.

  Attributes:
    tokens: int32 [T].
    mask: int32 [T], 1 on trained tokens. The first token is never trained: nothing
      stands before it to predict it from.
    prompt_length: tokens before the first trained one.
  """

  tokens: np.ndarray
  mask: np.ndarray
  prompt_length: int

  def __len__(self) -> int:
    return len(self.tokens)


def make_example(tokens: list[int], mask: list[int]) -> Example:
  """An example from equally long lists; the first token's mask becomes 0."""
  assert len(tokens) == len(mask)
  marks = np.asarray(mask, np.int32)
  marks[:1] = 0
  trained = np.flatnonzero(marks)
  return Example(
    tokens=np.asarray(tokens, np.int32),
    mask=marks,
    prompt_length=int(trained[0]) if len(trained) else len(marks),
  )


def check_policy(max_length: int, overlong: str) -> None:
  """Refuses an impossible length or an unknown policy.

  Raises:
    ValueError: which of the two, and what is possible.
  """
  if max_length < 2:
    raise ValueError(
      f"max_length {max_length} must be at least 2 tokens: one to read, one to learn"
    )
  if overlong not in get_args(Overlong):
    raise ValueError(
      f"overlong {overlong!r} is unknown; use one of {list(get_args(Overlong))}"
    )


def fit(
  example: Example, max_length: int, overlong: Overlong, *, bos_id: int | None = None
) -> Example | None:
  """The example in at most `max_length` tokens, or None when it is dropped.

  `truncate` cuts the end. Where the prompt alone fills the maximum, that would leave
  nothing to learn: then the prompt keeps its end (behind BOS, if it began with one)
  and the response keeps up to half of the maximum. A cut response learns no end.

  Raises:
    ValueError: it is longer and the policy is "error".
  """
  if len(example) <= max_length:
    return example
  if overlong == "drop":
    return None
  if overlong == "error":
    raise ValueError(_too_long(example, max_length))
  if example.prompt_length < max_length:
    return _pick(example, np.arange(max_length))
  response = min(len(example) - example.prompt_length, max_length // 2)
  stop = example.prompt_length + response
  keep = np.arange(stop - max_length, stop)
  if bos_id is not None and example.tokens[0] == bos_id:
    keep[0] = 0
  return _pick(example, keep)


def _pick(example: Example, keep: np.ndarray) -> Example:
  return make_example(example.tokens[keep].tolist(), example.mask[keep].tolist())


def _too_long(example: Example, max_length: int) -> str:
  remedy = 'raise max_length, or set overlong to "truncate" or "drop"'
  if example.prompt_length >= max_length:
    return (
      f"the prompt has {example.prompt_length} tokens and the maximum is {max_length}, "
      f"so no token of the response is left to train; {remedy}"
    )
  return f"{len(example)} tokens, more than the maximum of {max_length}; {remedy}"
