"""Rows of training requests: checks, and padded micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tunix.tinker.errors import TinkerError
from tunix.tinker.learning import losses
from tunix.tinker.learning.sparse import Sparse

_SMALLEST = 16  # tokens of the shortest padded row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One datum.

  Attributes:
    tokens: ids of the input, int32 [N].
    inputs: inputs of the loss by name, [N] each, or [N, K] with K targets for each
      position. `target_tokens` are the ids that the N positions predict.
  """

  tokens: np.ndarray
  inputs: Mapping[str, np.ndarray | Sparse]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatch:
  """Padded rows that are computed together.

  Attributes:
    rows: numbers of the rows in the request.
    arrays: tokens and segment_ids [B, T]; targets and the loss's inputs, [B, T] each,
      or [B, T, K] with K targets for each position.
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
  shape = (size,)
  if loss == "cross_entropy" and row.inputs["target_tokens"].ndim == 2:
    shape = (size, max(1, row.inputs["target_tokens"].shape[1]))
  out: dict[str, np.ndarray] = {}
  for name in needed:
    # int64 until the ids are checked: a cast to int32 would wrap large ones.
    kind = np.int64 if name == "target_tokens" else np.float32
    out[name] = _values(where, name, row.inputs[name], shape, kind)
  weights = np.ones(shape, np.float32)
  for name in ("weights", "mask"):
    if name in row.inputs:
      weights = weights * _values(where, name, row.inputs[name], shape, np.float32)
  out["weights"] = weights
  if losses.RATIO_MASK in out and not out[losses.RATIO_MASK].any():
    raise TinkerError(
      f"{where}: {losses.RATIO_MASK} is 0 at all tokens; expected a number other than "
      "0 at the sampled ones, whose mean ratio the loss takes. Correct the datum"
    )
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


def _values(
  where: str,
  name: str,
  value: np.ndarray | Sparse,
  shape: tuple[int, ...],
  kind: Any,
) -> np.ndarray:
  if value.shape != shape:
    each = "one value for each token of model_input"
    if len(shape) == 2:
      each += " and each of its targets"
    elif value.ndim == 2:
      each += "; only cross_entropy takes several targets"
    raise TinkerError(
      f"{where}: {name} has shape {list(value.shape)}; expected {list(shape)}, {each}. "
      "Correct the datum"
    )
  value = np.asarray(value)
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
  by_shape: dict[tuple[int, int], list[int]] = {}
  for i, row in enumerate(rows):
    width = _width(row)
    shape = _power(max(row.tokens.size, _SMALLEST)), width and _power(width)
    by_shape.setdefault(shape, []).append(i)
  for (length, width), numbers in sorted(by_shape.items()):
    # The largest power of two that fits, so that padding rows fit as well.
    most = max(1, _power(batch_tokens // length + 1) // 2)
    for start in range(0, len(numbers), most):
      part = numbers[start : start + most]
      yield MicroBatch(
        rows=tuple(part),
        arrays=_padded([rows[i] for i in part], (_power(len(part)), length), width),
      )


def _padded(
  rows: list[Row], shape: tuple[int, int], width: int
) -> dict[str, np.ndarray]:
  out: dict[str, np.ndarray] = {
    name: np.zeros(shape, np.int32) for name in ("tokens", "segment_ids")
  }
  for name, value in rows[0].inputs.items():
    out[name] = np.zeros((*shape, width) if width else shape, np.asarray(value).dtype)
  for i, row in enumerate(rows):
    size = row.tokens.size
    out["tokens"][i, :size] = row.tokens
    out["segment_ids"][i, :size] = 1
    for name, value in row.inputs.items():
      out[name][(i, *map(slice, value.shape))] = value
  return out


def _width(row: Row) -> int:
  """Returns the number K of targets for each position, 0 for inputs [N]."""
  shape = row.inputs["target_tokens"].shape
  return shape[1] if len(shape) == 2 else 0


def _power(number: int) -> int:
  """Returns the smallest power of two that is not smaller."""
  return 1 << (number - 1).bit_length()


def to_arrays(rows: Sequence[Row]) -> dict[str, np.ndarray]:
  """Returns rows as flat arrays, for the journal; `from_arrays` is the inverse."""
  out = {
    "lengths": np.array([row.tokens.size for row in rows], np.int32),
    "tokens": np.concatenate([row.tokens for row in rows]),
  }
  widths = np.array([_width(row) for row in rows], np.int32)
  if widths.any():
    out["widths"] = widths
  for name in rows[0].inputs:
    parts = [np.ravel(np.asarray(row.inputs[name])) for row in rows]
    out[f"inputs.{name}"] = np.concatenate(parts)
  return out


def from_arrays(arrays: Mapping[str, np.ndarray]) -> list[Row]:
  """Returns the rows of `to_arrays`."""
  inputs = {
    name.removeprefix("inputs."): split(values, arrays["lengths"], arrays.get("widths"))
    for name, values in arrays.items()
    if name.startswith("inputs.")
  }
  tokens = split(arrays["tokens"], arrays["lengths"])
  return [
    Row(tokens=x, inputs={name: parts[i] for name, parts in inputs.items()})
    for i, x in enumerate(tokens)
  ]


def split(
  values: np.ndarray, lengths: np.ndarray, widths: np.ndarray | None = None
) -> list[np.ndarray]:
  """Returns the values of each row of flat arrays.

  Args:
    values: the values of all rows, one after the other.
    lengths: number N of tokens of each row.
    widths: number K of targets for each position of a row; 0, or None for all rows: its
      values are [N] and not [N, K].
  """
  widths = np.zeros_like(lengths) if widths is None else widths
  ends = np.cumsum(lengths * np.maximum(widths, 1), dtype=np.int64)[:-1]
  parts = np.split(values, ends)
  return [x.reshape(-1, k) if k else x for x, k in zip(parts, widths)]
