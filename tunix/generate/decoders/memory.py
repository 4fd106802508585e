"""The decoding state of a model with a cache, and functions that move its rows.

All rows write to the same slot in a step, because the cache of a model accepts one slot
for the whole batch. Each row has its own visible slots and its own position. Therefore
a scheduler can add a row while others decode (`admit`), and can free slots at the end
of the cache when all are used (`shift`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from tunix.models.transformer.cache import KVCache
from tunix.models.transformer.shards import sharding
from tunix.utils import mesh as mesh_lib


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
  """The state between two decode steps of B rows with S slots each.

  Attributes:
    cache: the model's KV cache.
    visible: bool [B, S], False at padding and at slots that the row must not see.
    positions: int32 [B], position of each row's next token.
    slot: int32 scalar, the slot of the next token, the same for all rows.
  """

  cache: Any
  visible: jax.Array
  positions: jax.Array
  slot: jax.Array


def repeat(model: nnx.Module, memory: Memory, source: Int[Array, " B"] | int) -> Memory:
  """Returns the state whose row b is row `source[b]` of `memory`.

  It copies the prefill of a prompt to all of its samples, and the cache rows of beams
  to the beams that continue them.

  Args:
    model: the module that made the cache.
    memory: the state.
    source: row numbers; or an int, the copies of every row (see `rows_of`).
  """
  row_axes, _ = _axes(model, memory.visible.shape[1])

  def take(x, axis):
    return x if axis is None else rows_of(x, source, axis)

  return dataclasses.replace(
    memory,
    cache=pinned(model, _map(take, memory.cache, row_axes)),
    visible=rows_of(memory.visible, source),
    positions=rows_of(memory.positions, source),
  )


def rows_of(x: jax.Array, source: Int[Array, " B"] | int, axis: int = 0) -> jax.Array:
  """Takes rows of an array by their numbers, or repeats every row.

  Args:
    x: the array.
    source: row numbers [B]; or an int k, for k copies of each row, one after the other.
    axis: the axis of the rows.
  """
  if isinstance(source, int):
    # On a mesh each device repeats its own rows. A take by row numbers, which are
    # unknown to the compiler, would first all-gather the rows of all devices.
    return jnp.repeat(x, source, axis=axis)
  return jnp.take(x, source, axis=axis)


def shift(memory: Memory, by: Int[Array, ""]) -> Memory:
  """Moves every row `by` slots to the left, which frees `by` slots at the end.

  Keys hold the position of their token, not its slot, so a moved row decodes the same
  tokens. Only our own cache can be moved.

  Args:
    memory: the state; its first `by` slots are visible to no row.
    by: number of slots.
  """
  cache = memory.cache
  assert isinstance(cache, KVCache)

  # Axis 2 of keys and values is the slot. In the ring of a sliding layer with R slots,
  # token i is in slot i mod R, so the same roll moves each token by `by` there too.
  def roll(x):
    return jnp.roll(x, -by, axis=2)

  visible = jnp.roll(memory.visible, -by, axis=1)
  # The roll moves entries of padding, which are False, to the end, where the next
  # tokens are written. All slots from the new `slot` on must be visible.
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


def admit(
  model: nnx.Module, memory: Memory, newcomer: Memory, row: Int[Array, ""]
) -> Memory:
  """Replaces row `row` by the only row of `newcomer`; other rows are unchanged.

  Args:
    model: the module that made both caches.
    memory: rows that are being decoded; they must have used at least as many slots as
      the newcomer has tokens.
    newcomer: one row after its prefill, with the same number of slots.
    row: number of the row to replace.
  """
  # The newcomer's tokens move so that they end at the common slot. All of them move by
  # the same number of slots, because sliding windows are counted in slots.
  by = memory.slot - newcomer.slot
  row_axes, slot_axes = _axes(model, memory.visible.shape[1])
  if isinstance(memory.cache, KVCache):
    # `_axes` compares caches of S and S + 1 slots. The ring of a sliding layer has the
    # same length in both, so `_axes` does not find its slot axis. In our cache it is
    # always axis 2. States, the last leaves, have none.
    buffers = len(row_axes) - len(jax.tree.leaves(memory.cache.states))
    is_buffer = [n < buffers and axis is not None for n, axis in enumerate(row_axes)]
    slot_axes = [2 if own else None for own in is_buffer]

  def place(old, new, row_axis, slot_axis):
    if row_axis is None:
      return old
    new = new if slot_axis is None else jnp.roll(new, by, axis=slot_axis)
    return jax.lax.dynamic_update_slice_in_dim(
      old, new.astype(old.dtype), row, row_axis
    )

  used = newcomer.visible & ~_from(newcomer.visible, newcomer.slot)
  visible = jnp.roll(used, by, axis=1) | _from(used, memory.slot)
  cache = _map(place, memory.cache, newcomer.cache, row_axes, slot_axes)
  return dataclasses.replace(
    memory,
    cache=pinned(model, cache),
    visible=memory.visible.at[row].set(visible[0]),
    positions=memory.positions.at[row].set(newcomer.positions[0]),
  )


def pinned(model: Any, cache: Any) -> Any:
  """Shards our cache like the activations: rows over the batch axes, heads over `tp`.

  The cache of another model is returned unchanged.
  """
  if not isinstance(cache, KVCache):
    return cache
  rules = model.config.sharding
  rows = sharding.batch_axes(rules)
  spec = (rows, rules.tp, None, None)

  def pin(buffers):
    return tuple(mesh_lib.constrain(x, *spec) for x in buffers)

  def by_row(x):
    return mesh_lib.constrain(x, rows, *(None,) * (x.ndim - 1))

  states = jax.tree.map(by_row, cache.states)
  return dataclasses.replace(cache, k=pin(cache.k), v=pin(cache.v), states=states)


def cache_bytes(model: Any, slots: int) -> int:
  """Returns the bytes of one row's cache with `slots` slots; allocates nothing."""
  cache = jax.eval_shape(lambda: model.init_cache(1, slots))
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))


def _from(like: jax.Array, slot: jax.Array) -> jax.Array:
  """Returns bool [1, S], True from `slot` on."""
  return (jnp.arange(like.shape[1]) >= slot)[None]


def _axes(model: Any, slots: int) -> tuple[list[int | None], list[int | None]]:
  """Finds the row axis and the slot axis of every leaf of the model's cache.

  The cache of another model is an unknown tree. Its axes are found by comparing the
  shapes of caches with (1, S), (2, S) and (1, S + 1) rows and slots. The axis whose
  size differs is the row axis or the slot axis. The entry of a leaf without such an
  axis, such as a counter, is None.
  """

  def shapes(*size):
    return [
      x.shape for x in jax.tree.leaves(jax.eval_shape(lambda: model.init_cache(*size)))
    ]

  plain = shapes(1, slots)

  def differing(others):
    return [
      next((axis for axis, (m, n) in enumerate(zip(a, b)) if m != n), None)
      for a, b in zip(plain, others)
    ]

  return differing(shapes(2, slots)), differing(shapes(1, slots + 1))


def _map(function: Any, tree: object, *columns: object) -> Any:
  """Maps `function` over the leaves of a cache.

  Args:
    function: takes one leaf and one entry of each column.
    tree: the cache.
    *columns: caches of the same structure, or lists with one entry per leaf. Entries
      may be None, which `jax.tree.map` would treat as an empty subtree.
  """
  leaves, structure = jax.tree.flatten(tree)
  flat = [x if isinstance(x, list) else jax.tree.leaves(x) for x in columns]
  return structure.unflatten([function(*x) for x in zip(leaves, *flat)])
