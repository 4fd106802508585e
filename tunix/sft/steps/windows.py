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
from tunix.sft.steps.train_step import Group, examples_in
from tunix.utils import mesh as mesh_lib, terminal, tree
from tunix.utils.setting import field_values


@dataclasses.dataclass(frozen=True)
class Window:
  """The micro-batches of one optimizer step: a global batch, prepared.

  Attributes:
    groups: the micro-batches, grouped by shape, on their devices.
    drawn: number of micro-batches drawn from the data, fewer at the end of the data.
    tokens: tokens of all micro-batches, padding included; 0 if they have no tokens.
    rows: rows that each micro-batch was padded to; 0 if there is no padding.
    data_state: place in the data after the window; None for a batch that is not drawn.
  """

  groups: tuple[Group, ...]
  drawn: int
  tokens: int
  rows: int
  data_state: dict[str, Any] | None


def field(batch: object, name: str) -> Any:
  """Returns a field of a batch; None if the batch has no field of that name."""
  return batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)


def as_pytree(batch: object) -> Any:
  """Returns the batch as a pytree: a dataclass unknown to JAX becomes a dict.

  Raises:
    TypeError: The batch has no arrays.
  """
  if _is_plain_dataclass(batch):
    batch = batch_fields(batch)
  if not any(map(tree.is_array, jax.tree.leaves(batch))):
    raise TypeError(
      f"a batch of type {type(batch).__name__} holds no arrays; expected a "
      "TrainingInput, a dict or another pytree. Convert the batch in _prepare_inputs."
    )
  return batch


def _is_plain_dataclass(batch: object) -> bool:
  """Returns True for a dataclass that JAX does not know as a pytree."""
  if not dataclasses.is_dataclass(batch) or isinstance(batch, type):
    return False
  leaves = jax.tree.leaves(batch)
  return len(leaves) == 1 and leaves[0] is batch


def until_none(draw: Callable[[], Any]) -> Iterator[Any]:
  """Yields the results of a function until it returns None."""
  while (batch := draw()) is not None:
    yield batch


def pad_rows(batch: object, rows: int) -> Any:
  """Appends rows of zeros (mask 0, segment 0) until the batch has `rows` rows."""
  missing = rows - examples_in(batch)
  if missing <= 0:
    return batch

  def pad(leaf):
    if not tree.has_axes(leaf):
      return leaf
    return np.pad(np.asarray(leaf), [(0, missing)] + [(0, 0)] * (leaf.ndim - 1))

  return jax.tree.map(pad, batch)


def split_rows(batch: Any, parts: int) -> list[Any]:
  """Cuts a batch into micro-batches with equal numbers of rows.

  Raises:
    ValueError: The number of rows is no multiple of `parts`, or pairs share rows.
  """
  if _is_plain_dataclass(batch):
    parts_of_fields = split_rows(field_values(batch), parts)
    return [dataclasses.replace(batch, **part) for part in parts_of_fields]
  if parts > 1 and field(batch, "sequence") is not None:
    raise ValueError(
      f"the pairs of a global batch share rows, which cannot be cut into {parts} "
      "micro-batches. Pass the micro-batches to train(), or build the batch without "
      "shared_rows."
    )
  rows = examples_in(batch)
  if rows % parts:
    raise ValueError(
      f"a global batch of {terminal.counted(rows, 'row')} cannot be cut into "
      f"{terminal.counted(parts, 'micro-batch')}. Make the rows a multiple of "
      "gradient_accumulation_steps."
    )

  # An array may have one element for several adjacent rows: images of a group.
  def cut(x, i):
    size = len(x) // parts
    return x[i * size : (i + 1) * size]

  def part(i):
    return jax.tree.map(lambda x: cut(x, i) if tree.has_axes(x) else x, batch)

  return [batch] if parts == 1 else [part(i) for i in range(parts)]


def cut(batch: object, parts: int) -> list[Any]:
  """Cuts a global batch into micro-batches; a single one may be any object.

  Raises:
    TypeError: The batch has no arrays.
    ValueError: The number of rows is no multiple of `parts`.
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
  """Moves prepared micro-batches to their devices, and groups them.

  Args:
    ready: the prepared micro-batches.
    config: the trainer's settings.
    drawn, data_state, rows: see `Window`.
    whole: see `sharding_utils.shard_input`.
  """
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
  """Groups micro-batches by shape, and adds fillers up to `size` micro-batches.

  A train step is compiled for the shapes of its groups. At the end of the data fewer
  than `size` micro-batches are left; copies of the last one with weight 0 complete the
  number, so that the same program runs.
  """
  filled = [*batches, *[batches[-1]] * (size - len(batches))]
  weights = [1.0] * len(batches) + [0.0] * (size - len(batches))
  by_shape: dict[Any, list[tuple[Any, float]]] = {}
  for batch, weight in zip(filled, weights):
    leaves, structure = jax.tree.flatten(batch)
    shapes = tuple((np.shape(x), str(getattr(x, "dtype", type(x)))) for x in leaves)
    by_shape.setdefault((structure, shapes), []).append((batch, weight))
  # Sorted by shape, not in the order of the data: otherwise the same shapes in another
  # order would compile another program.
  return tuple(
    Group(tuple(b for b, _ in items), np.asarray([w for _, w in items], np.float32))
    for _, items in sorted(by_shape.items(), key=lambda item: str(item[0]))
  )


def pad_to_largest(batches: Sequence[Any], rows: int) -> tuple[list[Any], int]:
  """Pads micro-batches to equal numbers of rows, so that nothing new is compiled.

  Batches without an `input_mask` are not padded, because only the mask can mark a row
  as padding.

  Args:
    batches: the micro-batches.
    rows: the least number of rows, that of the largest micro-batch so far.

  Returns: (padded micro-batches, their number of rows).
  """
  if any(field(batch, "input_mask") is None for batch in batches):
    return list(batches), rows
  rows = max([rows, *(examples_in(batch) for batch in batches)])
  return [pad_rows(batch, rows) for batch in batches], rows


def check_read(batches: Sequence[Any], accepted: Collection[str]) -> None:
  """Refuses batches that the model would misread.

  Args:
    batches: micro-batches on the host.
    accepted: names of the arguments of the model's `__call__`.

  Raises:
    ValueError: See `check_packed` and `check_positions`.
  """
  check_packed(batches, accepted)
  check_positions(batches, accepted)


def check_trained(batches: Sequence[Any]) -> None:
  """Refuses a global batch in which no token is trained.

  Raises:
    ValueError: Every mask is zero; the message lists possible reasons.
  """
  masks = [field(batch, "input_mask") for batch in batches]
  if not masks or any(mask is None for mask in masks) or jax.process_count() > 1:
    return
  weights = [field(batch, "loss_weights") for batch in batches]
  masks = [m if w is None else np.asarray(m) * w for m, w in zip(masks, weights)]
  if not any(np.any(np.asarray(mask)[:, 1:]) for mask in masks):
    rows = sum(np.shape(mask)[0] for mask in masks)
    raise ValueError(
      f"a global batch of {terminal.counted(rows, 'row')} has no trained token "
      "(input_mask is zero after "
      "the first column). The records have no assistant text, their prompts fill the "
      "maximum length, or the mask is inverted; look at a batch with `tunix data show`."
    )


def check_packed(batches: Sequence[Any], accepted: Collection[str]) -> None:
  """Refuses packed rows if the model would attend from one example to another.

  Args:
    batches, accepted: see `check_read`.

  Raises:
    ValueError: A row has several segments, and the model takes neither `segment_ids`
      nor `attention_mask`.
  """
  if {"segment_ids", "attention_mask"} & set(accepted) or jax.process_count() > 1:
    return
  segments = [field(batch, "segment_ids") for batch in batches]
  if any(s is not None and np.max(np.asarray(s), initial=0) > 1 for s in segments):
    raise ValueError(
      "the rows are packed (segment_ids above 1), but the model takes neither "
      "segment_ids nor attention_mask, and would attend from one example to another. "
      "Train it without packing, or add one of these arguments to the model."
    )


def check_positions(batches: Sequence[Any], accepted: Collection[str]) -> None:
  """Refuses positions that the model does not take and would number differently.

  Args:
    batches, accepted: see `check_read`.

  Raises:
    ValueError: The positions are not 0, 1, 2, ... from the first column. A model that
      takes `segment_ids` can number the positions itself.
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
        "model takes no positions. Add that argument to the model, or pad on the right."
      )


def token_count(batches: Sequence[Any], axes: Sequence[str]) -> int:
  """Returns the number of tokens of a global batch over all processes, with padding."""
  tokens = [field(batch, "input_tokens") for batch in batches]
  _, parts = sharding_utils.process_part(mesh_lib.current_mesh(), axes)
  return sum(np.size(t) for t in tokens if t is not None) * parts
