"""The cache on devices whose attention does not read pages: rows over pages.

Every slot has a row of W tokens, in the layout that attention of one token needs. The
pages hold the same keys and values for longer than a row: a completion that gets a slot
is loaded from its pages, and a launch ends by writing the pages that it changed. A
token is at the place of its position, so a row needs no padding and no mask of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tunix.models.transformer import attention_paths
from tunix.models.transformer.config import ShardingRules
from tunix.models.transformer.visibility import Visibility

Leaf = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Places:
  """Where the T tokens of a round are: first those of all slots, then blocks.

  Attributes:
    slots: int32 [T], slot of each token; B for tokens that are not written.
    positions: int32 [T].
    block_slots: int32 [N], slot of each block.
    width: number of tokens of each slot.
    block_width: number of tokens of each block.
  """

  slots: Leaf
  positions: Leaf
  block_slots: Leaf
  width: int = dataclasses.field(metadata={"static": True})
  block_width: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowLayer:
  """The rows of one layer: keys and values, [B, K, W, H] each."""

  k: jax.Array
  v: jax.Array
  places: Places

  def attend(
    self,
    query: Float[Array, "T 1 N H"],
    key: Float[Array, "T 1 K H"],
    value: Float[Array, "T 1 K H"],
    *,
    scale: float | None,
    softcap: float | None,
    window: int | None,
    implementation: str,
    rules: ShardingRules,
  ) -> tuple[Float[Array, "T 1 N H"], RowLayer]:
    """Writes the tokens' keys and values, and attends to those of their rows."""
    p = self.places
    write = lambda rows, new: rows.at[p.slots, :, p.positions].set(
      new[:, 0].astype(rows.dtype), mode="drop", unique_indices=True
    )
    k, v = write(self.k, key), write(self.v, value)

    def attend(query, k, v, positions):
      index = jnp.arange(k.shape[2])
      seen = index <= positions[:, :, None]
      if window is not None:
        seen &= index > positions[:, :, None] - window
      return attention_paths.attend(
        query,
        k.swapaxes(1, 2).astype(query.dtype),
        v.swapaxes(1, 2).astype(query.dtype),
        Visibility(jnp.zeros(query.shape[1], jnp.int32), seen),
        scale=scale,
        softcap=softcap,
        implementation=implementation,
        rules=rules,
      )

    slots, tail = k.shape[0], query.shape[2:]
    own, blocks = slots * p.width, p.block_slots.shape[0]
    out = []
    if p.width:
      grouped = lambda x: x.reshape(slots, p.width, *x.shape[2:])
      out.append(
        attend(grouped(query[:own]), k, v, p.positions[:own].reshape(slots, -1))
      )
    if blocks:
      grouped = lambda x: x.reshape(blocks, p.block_width, *x.shape[2:])
      take = lambda rows: jnp.take(rows, p.block_slots, axis=0, mode="clip")
      positions = p.positions[own:].reshape(blocks, -1)
      out.append(attend(grouped(query[own:]), take(k), take(v), positions))
    flat = jnp.concatenate([x.reshape(-1, 1, *tail) for x in out])
    return flat, dataclasses.replace(self, k=k, v=v)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Store:
  """Keys and values of all layers: rows [B, K, W, H] and pages [P, K, page, H].

  Attributes:
    rows_k, rows_v: one array a layer.
    pages_k, pages_v: one array a layer.
  """

  rows_k: tuple[jax.Array, ...]
  rows_v: tuple[jax.Array, ...]
  pages_k: tuple[jax.Array, ...]
  pages_v: tuple[jax.Array, ...]

  def at(self, places: Places) -> RowCache:
    """Returns the cache of a call of the model."""
    return RowCache(self.rows_k, self.rows_v, places)

  def after(self, cache: RowCache) -> Store:
    """Returns the store with the rows that a call of the model returned."""
    return dataclasses.replace(self, rows_k=cache.k, rows_v=cache.v)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowCache:
  """The cache argument of a call: rows of all layers, and the tokens' places."""

  k: tuple[jax.Array, ...]
  v: tuple[jax.Array, ...]
  places: Places

  index = 0  # positions are given, see `Places`

  @property
  def size(self) -> int:
    """Number of tokens W of a row."""
    return self.k[0].shape[2]

  def layer(self, number: int) -> RowLayer:
    """Returns the cache of one layer."""
    return RowLayer(self.k[number], self.v[number], self.places)

  def replaced(self, layers: Sequence[RowLayer], tokens: int) -> RowCache:
    """Returns the cache after a call that wrote `tokens` tokens to each layer."""
    del tokens
    k, v = (tuple(getattr(x, name) for x in layers) for name in ("k", "v"))
    return dataclasses.replace(self, k=k, v=v)


def empty_pages(
  pages: int, page_tokens: int, layers: int, kv_heads: int, head_dim: int, dtype: Any
) -> tuple[jax.Array, ...]:
  """Returns zero pages of keys, or of values, of all layers."""
  shape = (pages, kv_heads, page_tokens, head_dim)
  return tuple(jnp.zeros(shape, dtype) for _ in range(layers))


def load(store: Store, copies: Int[Array, "n 2"], count, loads, load_count) -> Store:
  """Copies pages, and then fills parts of rows from pages.

  Args:
    store: donated.
    copies: (from, to) page numbers; the first `count` are used.
    count: int32 scalar.
    loads: int32 [m, 3], (slot, page of the row, page number); the first `load_count`
      are used.
    load_count: int32 scalar.
  """
  size = store.pages_k[0].shape[2]

  def copy(i, arrays):
    one = lambda pages: jax.lax.dynamic_update_index_in_dim(
      pages, pages[copies[i, 0]], copies[i, 1], 0
    )
    return jax.tree.map(one, arrays)

  pages = store.pages_k, store.pages_v
  pages = jax.lax.fori_loop(0, count, copy, pages)

  def fill(i, rows):
    slot, place, page = loads[i, 0], loads[i, 1], loads[i, 2]
    one = lambda row, source: jax.lax.dynamic_update_slice(
      row, source[page][None], (slot, 0, place * size, 0)
    )
    return jax.tree.map(one, rows, pages)

  rows = store.rows_k, store.rows_v
  rows = jax.lax.fori_loop(0, load_count, fill, rows)
  return Store(*rows, *pages)


def write_back(store: Store, writes: Int[Array, "m 3"], count) -> Store:
  """Writes parts of rows to pages.

  Args:
    store: donated.
    writes: int32 [m, 3], (slot, page of the row, page number); the first `count` are
      used.
    count: int32 scalar.
  """
  size = store.pages_k[0].shape[2]

  def write(i, pages):
    slot, place, page = writes[i, 0], writes[i, 1], writes[i, 2]

    def one(target, row):
      shape = (1, row.shape[1], size, row.shape[3])
      part = jax.lax.dynamic_slice(row, (slot, 0, place * size, 0), shape)
      return jax.lax.dynamic_update_slice(target, part, (page, 0, 0, 0))

    return jax.tree.map(one, pages, (store.rows_k, store.rows_v))

  pages = (store.pages_k, store.pages_v)
  pages = jax.lax.fori_loop(0, count, write, pages)
  return Store(store.rows_k, store.rows_v, *pages)
