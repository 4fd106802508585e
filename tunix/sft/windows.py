"""Global batches: micro-batches prepared, padded and grouped for one jitted step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tunix.sft import sharding_utils
from tunix.sft.config import TrainingConfig
from tunix.sft.losses import batch_fields
from tunix.sft.train_step import Group, examples_in
from tunix.utils import mesh as mesh_lib


@dataclasses.dataclass(frozen=True)
class Window:
  """The micro-batches of one optimizer step.

  Attributes:
    groups: what the step takes.
    drawn: micro-batches drawn for it (fewer than usual at the end of the data).
    tokens: tokens in it, padding included; 0 when the batches hold none.
    rows: that its micro-batches were padded to; 0: they were not.
    data_state: the place in the data after it.
  """

  groups: tuple[Group, ...]
  drawn: int
  tokens: int
  rows: int
  data_state: dict[str, Any] | None


def field(batch: Any, name: str) -> Any:
  """A field of a batch, None if it has none of that name."""
  return batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)


def as_pytree(batch: Any) -> Any:
  """A batch that `jax.jit` can take: dataclasses JAX does not know become dicts.

  Raises:
    TypeError: it holds no arrays.
  """
  if _is_plain_dataclass(batch):
    batch = batch_fields(batch)
  if not any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(batch)):
    raise TypeError(
      f"a batch of type {type(batch).__name__} holds no arrays: yield a TrainingInput, "
      "a dict or any pytree of arrays, or convert it in _prepare_inputs"
    )
  return batch


def _is_plain_dataclass(batch: Any) -> bool:
  """Whether it is a dataclass that JAX takes for a leaf."""
  if not dataclasses.is_dataclass(batch) or isinstance(batch, type):
    return False
  leaves = jax.tree.leaves(batch)
  return len(leaves) == 1 and leaves[0] is batch


def until_none(draw: Callable[[], Any]) -> Iterator[Any]:
  """What a function gives, up to None."""
  while (batch := draw()) is not None:
    yield batch


def pad_rows(batch: Any, rows: int) -> Any:
  """Appends rows of zeros (mask 0, segment 0) up to `rows`."""
  missing = rows - examples_in(batch)
  if missing <= 0:
    return batch

  def pad(leaf):
    if not getattr(leaf, "ndim", 0):
      return leaf
    return np.pad(np.asarray(leaf), [(0, missing)] + [(0, 0)] * (leaf.ndim - 1))

  return jax.tree.map(pad, batch)


def split_rows(batch: Any, parts: int) -> list[Any]:
  """Cuts a global batch into micro-batches of equally many rows.

  Raises:
    ValueError: the rows do not divide.
  """
  if _is_plain_dataclass(batch):
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    return [dataclasses.replace(batch, **part) for part in split_rows(fields, parts)]
  rows = examples_in(batch)
  if rows % parts:
    raise ValueError(
      f"a global batch of {rows} rows cannot be cut into {parts} micro-batches: make "
      "the rows a multiple of gradient_accumulation_steps"
    )
  size = rows // parts

  def cut(i):
    return jax.tree.map(
      lambda x: x[i * size : (i + 1) * size] if getattr(x, "ndim", 0) else x, batch
    )

  return [batch] if parts == 1 else [cut(i) for i in range(parts)]


def cut(batch: Any, parts: int) -> list[Any]:
  """A global batch as micro-batches of equally many rows.

  Raises:
    ValueError: the rows do not divide.
  """
  return [batch] if parts == 1 else split_rows(as_pytree(batch), parts)


def make(
  ready: Sequence[Any],
  config: TrainingConfig,
  drawn: int,
  data_state: Any,
  *,
  rows: int = 0,
  whole: bool = False,
) -> Window:
  """Prepared micro-batches as what a step takes, on their devices; `rows` as in
  `Window`, `whole` as in `sharding_utils.shard_input`."""
  axes = config.data_sharding_axis
  return Window(
    groups=group(
      [sharding_utils.shard_input(batch, axes, whole=whole) for batch in ready],
      config.micro_batches,
    ),
    drawn=drawn,
    tokens=token_count(ready, axes),
    rows=rows,
    data_state=data_state,
  )


def group(batches: Sequence[Any], size: int) -> tuple[Group, ...]:
  """Groups micro-batches by shape; a short window is filled up with weight 0."""
  filled = [*batches, *[batches[-1]] * (size - len(batches))]
  weights = [1.0] * len(batches) + [0.0] * (size - len(batches))
  by_shape: dict[Any, list[tuple[Any, float]]] = {}
  for batch, weight in zip(filled, weights):
    leaves, structure = jax.tree.flatten(batch)
    shapes = tuple((np.shape(x), str(getattr(x, "dtype", type(x)))) for x in leaves)
    by_shape.setdefault((structure, shapes), []).append((batch, weight))
  # In the order of the shapes, not of the data: fewer programs are compiled.
  return tuple(
    Group(tuple(b for b, _ in items), np.asarray([w for _, w in items], np.float32))
    for _, items in sorted(by_shape.items(), key=lambda item: str(item[0]))
  )


def pad_to_largest(batches: Sequence[Any], rows: int) -> tuple[list[Any], int]:
  """Pads micro-batches to the rows of the largest of them, or to `rows` if that is
  more, so that a smaller last one compiles nothing new. Those without an `input_mask`
  stay as they are: nothing says what a row of zeros means in them.

  Returns: (batches, rows they have now).
  """
  if any(field(batch, "input_mask") is None for batch in batches):
    return list(batches), rows
  rows = max([rows, *(examples_in(batch) for batch in batches)])
  return [pad_rows(batch, rows) for batch in batches], rows


def check_read(batches: Sequence[Any], accepted: Collection[str]) -> None:
  """Refuses what a model would read otherwise than it is meant.

  Args:
    batches: micro-batches on the host.
    accepted: names that the model's `__call__` takes.

  Raises:
    ValueError: it would misread rows or positions.
  """
  check_packed(batches, accepted)
  check_positions(batches, accepted)


def check_trained(batches: Sequence[Any]) -> None:
  """Refuses a global batch in which no token is trained.

  Raises:
    ValueError: every mask is zero; the message says why that happens.
  """
  masks = [field(batch, "input_mask") for batch in batches]
  if not masks or any(mask is None for mask in masks) or jax.process_count() > 1:
    return
  weights = [field(batch, "loss_weights") for batch in batches]
  masks = [m if w is None else np.asarray(m) * w for m, w in zip(masks, weights)]
  if not any(np.any(np.asarray(mask)[:, 1:]) for mask in masks):
    rows = sum(np.shape(mask)[0] for mask in masks)
    raise ValueError(
      f"a global batch of {rows} rows has no trained token (input_mask is zero after "
      "the first column): the records have no assistant text, their prompts fill the "
      "maximum length, or the mask was built the wrong way round; look at a batch with "
      "`tunix data show`"
    )


def check_packed(batches: Sequence[Any], accepted: Collection[str]) -> None:
  """Refuses packed rows for a model that would look from one example into another.

  Args:
    batches: micro-batches on the host.
    accepted: names that the model's `__call__` takes.

  Raises:
    ValueError: a row holds several segments, and the model takes neither
      `segment_ids` nor `attention_mask`.
  """
  if {"segment_ids", "attention_mask"} & set(accepted) or jax.process_count() > 1:
    return
  segments = [field(batch, "segment_ids") for batch in batches]
  if any(s is not None and np.max(np.asarray(s), initial=0) > 1 for s in segments):
    raise ValueError(
      "the rows are packed (segment_ids above 1), but the model takes neither "
      "segment_ids nor attention_mask and would look from one example into another: "
      "train it without packing, or give it one of these arguments"
    )


def check_positions(batches: Sequence[Any], accepted: Collection[str]) -> None:
  """Refuses positions that a model does not take and would count differently.

  Raises:
    ValueError: they do not count 0, 1, 2, ... from the first column. A model that takes
      segment_ids can count by itself.
  """
  if {"positions", "segment_ids"} & set(accepted) or jax.process_count() > 1:
    return
  for batch in batches:
    if (positions := field(batch, "positions")) is None:
      continue
    segments = field(batch, "segment_ids")
    real = True if segments is None else np.asarray(segments) == 1
    counted = np.arange(np.shape(positions)[1])
    if np.any((np.asarray(positions) != counted) & real):
      raise ValueError(
        "the batch has positions that do not count from the first column, and the "
        "model takes no positions: give it that argument, or pad on the right"
      )


def token_count(batches: Sequence[Any], axes: Sequence[str]) -> int:
  """Tokens of all processes in a global batch, padding included."""
  tokens = [field(batch, "input_tokens") for batch in batches]
  _, parts = sharding_utils.process_part(mesh_lib.current_mesh(), axes)
  return sum(np.size(t) for t in tokens if t is not None) * parts
