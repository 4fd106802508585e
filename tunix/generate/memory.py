"""What a model with a cache carries from token to token, and how its rows move.

All rows write to one slot at a time, which is what a model's own cache can be asked
for; which slots are a row's, and at which position it stands, is each row's own. So a
scheduler can let a row in while others decode (`admit`), and make room when the slots
run out (`shift`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from tunix.models.transformer import sharding
from tunix.models.transformer.cache import KVCache
from tunix.utils import mesh as mesh_lib


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
  """What the next step goes on from.

  Attributes:
    cache: the model's own.
    visible: bool [B, S], slots that hold a token of the row, or will.
    positions: int32 [B], position of the next token.
    slot: int32 scalar, where the next token goes.
  """

  cache: Any
  visible: jax.Array
  positions: jax.Array
  slot: jax.Array


def repeat(model: Any, memory: Memory, source: Int[Array, " B"] | int) -> Memory:
  """Row b of the result is row `source[b]` of `memory`: one prefill, many rows; with a
  number each row comes so often, see `rows_of`."""
  rows, _ = _axes(model, memory.visible.shape[1])
  take = lambda x, axis: x if axis is None else rows_of(x, source, axis)
  return dataclasses.replace(
    memory,
    cache=pinned(model, _map(take, memory.cache, rows)),
    visible=rows_of(memory.visible, source),
    positions=rows_of(memory.positions, source),
  )


def rows_of(x: jax.Array, source: Int[Array, " B"] | int, axis: int = 0) -> jax.Array:
  """The rows of these numbers; or all of them, each so often, one after the other. On a
  mesh a device then copies its own rows, where numbers that come as data would have all
  rows of all devices gathered first."""
  if isinstance(source, int):
    return jnp.repeat(x, source, axis=axis)
  return jnp.take(x, source, axis=axis)


def shift(memory: Memory, by: Int[Array, ""]) -> Memory:
  """Moves every row `by` slots to the left, so that as many come free at the end.

  The first `by` slots must be visible to no row. For our own cache only: another
  model's knows by itself where its next token goes.
  """
  cache = memory.cache
  assert isinstance(cache, KVCache)
  roll = lambda x: jnp.roll(x, -by, axis=2)  # a ring turns by as much
  visible = jnp.roll(memory.visible, -by, axis=1)
  visible |= _from(memory.visible, memory.slot - by)
  return dataclasses.replace(
    memory,
    cache=dataclasses.replace(
      cache,
      k=tuple(map(roll, cache.k)),
      v=tuple(map(roll, cache.v)),
      index=cache.index - by,
    ),
    visible=visible,
    slot=memory.slot - by,
  )


def admit(model: Any, memory: Memory, newcomer: Memory, row: Int[Array, ""]) -> Memory:
  """Puts the one row of `newcomer` (of `prefill`) in the place of row `row`.

  Its tokens are moved so that they end where the others' do: windows count in slots,
  and distances stay as they are.

  Args:
    memory: rows that are being decoded; at least as many slots used as the newcomer
      has tokens.
    newcomer: one row, with as many slots.
    row: its place.
  """
  by = memory.slot - newcomer.slot
  rows, slots = _axes(model, memory.visible.shape[1])
  if isinstance(memory.cache, KVCache):  # a ring has as many slots in a longer cache
    slots = [None if axis is None else 2 for axis in rows]

  def place(old, new, row_axis, slot_axis):
    if row_axis is None:
      return old
    new = new if slot_axis is None else jnp.roll(new, by, axis=slot_axis)
    return jax.lax.dynamic_update_slice_in_dim(
      old, new.astype(old.dtype), row, row_axis
    )

  used = newcomer.visible & ~_from(newcomer.visible, newcomer.slot)
  visible = jnp.roll(used, by, axis=1) | _from(used, memory.slot)
  return dataclasses.replace(
    memory,
    cache=pinned(model, _map(place, memory.cache, newcomer.cache, rows, slots)),
    visible=memory.visible.at[row].set(visible[0]),
    positions=memory.positions.at[row].set(newcomer.positions[0]),
  )


def pinned(model: Any, cache: Any) -> Any:
  """Our cache split like the activations: rows by the batch axes, heads by tp."""
  if not isinstance(cache, KVCache):
    return cache
  rules = model.config.sharding
  spec = (sharding.batch_axes(rules), rules.tp, None, None)
  pin = lambda buffers: tuple(mesh_lib.constrain(x, *spec) for x in buffers)
  return dataclasses.replace(cache, k=pin(cache.k), v=pin(cache.v))


def _from(like: jax.Array, slot: jax.Array) -> jax.Array:
  """bool [1, S], True from `slot` on."""
  return (jnp.arange(like.shape[1]) >= slot)[None]


def _axes(model: Any, slots: int) -> tuple[list[int | None], list[int | None]]:
  """The axis of the rows, and of the slots, of every leaf of the model's cache; None
  where a leaf has none. Read off the shapes of caches of other sizes."""
  shapes = lambda *size: [
    x.shape for x in jax.tree.leaves(jax.eval_shape(lambda: model.init_cache(*size)))
  ]
  plain = shapes(1, slots)

  def differing(others):
    return [
      next((axis for axis, (m, n) in enumerate(zip(a, b)) if m != n), None)
      for a, b in zip(plain, others)
    ]

  return differing(shapes(2, slots)), differing(shapes(1, slots + 1))


def _map(function: Any, tree: Any, *beside: Any) -> Any:
  """tree.map over the leaves of caches and lists with an entry a leaf."""
  leaves, structure = jax.tree.flatten(tree)
  columns = [x if isinstance(x, list) else jax.tree.leaves(x) for x in beside]
  return structure.unflatten([function(*x) for x in zip(leaves, *columns)])
