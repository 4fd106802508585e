"""Rows of training requests: checks, and padded micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tunix.tinker.errors import TinkerError
from tunix.tinker.learning import losses

_SMALLEST = 16  # tokens of the shortest padded row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One datum.

  Attributes:
    tokens: ids of the input, int32 [N].
    inputs: inputs of the loss by name, [N] each. `target_tokens` are the ids that the
      N positions predict.
  """

  tokens: np.ndarray
  inputs: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatch:
  """Padded rows that are computed together.

  Attributes:
    rows: numbers of the rows in the request.
    arrays: tokens, segment_ids, targets and the loss's inputs, [B, T] each.
  """

  rows: tuple[int, ...]
  arrays: dict[str, np.ndarray]


def check_rows(
  rows: Sequence[Row], loss: str, *, vocab_size: int, max_tokens: int
) -> list[Row]:
  """Returns the rows with the inputs that the loss takes, in their final dtypes.

  Args:
    rows: the data of a request.
    loss: name of the loss.
    vocab_size: number of ids of the model.
    max_tokens: most tokens of a row.

  Raises:
    TinkerError: a row has no tokens, too many, ids outside the vocabulary, or inputs
      that are missing, unknown or of another shape.
  """
  if not rows:
    raise TinkerError("data is empty; expected at least one datum. Send some rows")
  needed = ("target_tokens", *losses.loss_named(loss).inputs)
  return [
    _checked(i, row, needed, loss, vocab_size, max_tokens) for i, row in enumerate(rows)
  ]


def _checked(
  number: int,
  row: Row,
  needed: tuple[str, ...],
  loss: str,
  vocab_size: int,
  max_tokens: int,
) -> Row:
  where = f"datum {number}"
  size = row.tokens.size
  if not 1 <= size <= max_tokens:
    raise TinkerError(
      f"{where} has {size} tokens; expected 1 to {max_tokens}. Shorten the row"
    )
  # The client sends `mask` with data of reinforcement learning in some recipes.
  unknown = set(row.inputs) - {*needed, "weights", "mask"}
  missing = [name for name in needed if name not in row.inputs]
  if unknown or missing:
    names = ", ".join(sorted(row.inputs)) or "none"
    raise TinkerError(
      f"{where} has the loss_fn_inputs {names}; expected {', '.join(needed)} and "
      f"maybe weights for {loss}. Correct the datum"
    )
  out: dict[str, np.ndarray] = {}
  for name in needed:
    # int64 until the ids are checked: a cast to int32 would wrap large ones.
    kind = np.int64 if name == "target_tokens" else np.float32
    out[name] = _vector(where, name, row.inputs[name], size, kind)
  weights = np.ones(size, np.float32)
  for name in ("weights", "mask"):
    if name in row.inputs:
      weights = weights * _vector(where, name, row.inputs[name], size, np.float32)
  out["weights"] = weights
  for name, ids in (
    ("model_input", row.tokens),
    ("target_tokens", out["target_tokens"]),
  ):
    if ids.min() < 0 or ids.max() >= vocab_size:
      raise TinkerError(
        f"{where} has ids from {ids.min()} to {ids.max()} in {name}; expected 0 to "
        f"{vocab_size - 1}. Check the tokenizer"
      )
  out["target_tokens"] = out["target_tokens"].astype(np.int32)
  return Row(tokens=row.tokens.astype(np.int32), inputs=out)


def _vector(
  where: str, name: str, value: np.ndarray, size: int, kind: Any
) -> np.ndarray:
  if value.shape != (size,):
    more = ""
    if value.ndim == 2:
      more = " Several targets for each position are not served."
    raise TinkerError(
      f"{where}: {name} has shape {list(value.shape)}; expected [{size}], one value "
      f"for each token of model_input.{more} Correct the datum"
    )
  with np.errstate(all="ignore"):  # of values that are refused below
    out = value.astype(kind)
  is_right = out == value if kind == np.int64 else np.isfinite(out)
  if name == "mask":
    is_right = (out >= 0) & (out <= 1)
  if not is_right.all():
    expected = "integers" if kind == np.int64 else "finite numbers"
    raise TinkerError(
      f"{where}: {name} has the value {value[~is_right][0]}; expected "
      f"{'numbers from 0 to 1' if name == 'mask' else expected}. Correct the datum"
    )
  return out


def micro_batches(rows: Sequence[Row], batch_tokens: int) -> Iterator[MicroBatch]:
  """Yields micro-batches of rows of about equal length.

  Lengths and numbers of rows are powers of two, so that few programs are compiled. The
  cut depends on the rows alone: a request has the same gradient bits at any time.

  Args:
    rows: checked rows.
    batch_tokens: most tokens of a micro-batch, padding included; a longer row has a
      micro-batch of its own.
  """
  by_length: dict[int, list[int]] = {}
  for i, row in enumerate(rows):
    by_length.setdefault(_power(max(row.tokens.size, _SMALLEST)), []).append(i)
  for length, numbers in sorted(by_length.items()):
    # The largest power of two that fits, so that padding rows fit as well.
    most = max(1, _power(batch_tokens // length + 1) // 2)
    for start in range(0, len(numbers), most):
      part = numbers[start : start + most]
      yield MicroBatch(
        rows=tuple(part),
        arrays=_padded([rows[i] for i in part], _power(len(part)), length),
      )


def _padded(rows: list[Row], count: int, length: int) -> dict[str, np.ndarray]:
  fields = {"tokens": np.int32, "segment_ids": np.int32}
  fields |= {name: x.dtype.type for name, x in rows[0].inputs.items()}
  out = {name: np.zeros((count, length), kind) for name, kind in fields.items()}
  for i, row in enumerate(rows):
    size = row.tokens.size
    out["tokens"][i, :size] = row.tokens
    out["segment_ids"][i, :size] = 1
    for name, value in row.inputs.items():
      out[name][i, :size] = value
  return out


def _power(number: int) -> int:
  """Returns the smallest power of two that is not smaller."""
  return 1 << (number - 1).bit_length()


def to_arrays(rows: Sequence[Row]) -> dict[str, np.ndarray]:
  """Returns rows as flat arrays, for the journal; `from_arrays` is the inverse."""
  out = {
    "lengths": np.array([row.tokens.size for row in rows], np.int32),
    "tokens": np.concatenate([row.tokens for row in rows]),
  }
  for name in rows[0].inputs:
    out[f"inputs.{name}"] = np.concatenate([row.inputs[name] for row in rows])
  return out


def from_arrays(arrays: Mapping[str, np.ndarray]) -> list[Row]:
  """Returns the rows of `to_arrays`."""
  ends = np.cumsum(arrays["lengths"])[:-1]
  cut = {name: np.split(x, ends) for name, x in arrays.items() if name != "lengths"}
  names = [name for name in cut if name.startswith("inputs.")]
  return [
    Row(tokens=tokens, inputs={n.removeprefix("inputs."): cut[n][i] for n in names})
    for i, tokens in enumerate(cut["tokens"])
  ]
