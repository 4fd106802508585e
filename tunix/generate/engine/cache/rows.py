"""The cache for devices whose attention does not read pages: rows backed by pages.

Every slot has a row of W tokens, in the layout that attention of one token needs. Keys
are stored in tiles of T tokens, [W / T, H, T], and values in tiles of E of their H
features, [H / E, W, E]. The product of a query with a row is then a batch of products
with matrices of 16 to 64 columns. XLA's CPU backend multiplies these matrices without a
copy, and copies wider ones first. For 8 rows of 256 tokens and 4 heads of 64 features,
the scores of a layer take 0.10 ms instead of 0.24 ms. With 128 features they take
0.19 ms instead of 0.48 ms. The token at position p is at index p of its row, so a row
needs no padding.

The pages keep the same keys and values for longer than a row does. When a completion
gets a slot, its row is filled from its pages. At the end of a launch, the pages that it
filled are written from the rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tunix.models.transformer.attention import blockwise, paths as attention_paths
from tunix.models.transformer.config import ShardingRules
from tunix.models.transformer.visibility import Visibility
from tunix.ops import sinks as sink_ops
from tunix.ops.vocabulary import invariant
from tunix.utils import mesh as mesh_lib

Leaf = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Places:
  """The places of the T tokens of a round: tokens of all slots, then tokens of blocks.

  Attributes:
    slots: int32 [T], slot of each token; B (the number of slots) if it is not written.
    positions: int32 [T].
    block_slots: int32 [N], slot of each block.
    width: number of tokens of each slot.
    block_width: number of tokens of each block.
    block_last: int32 [N, block_width], position of the last token that each token of a
      block attends to; None: its own.
    windowed_last: True if `block_last` is for layers with a window only.
  """

  slots: Leaf
  positions: Leaf
  block_slots: Leaf
  width: int = dataclasses.field(metadata={"static": True})
  block_width: int = dataclasses.field(metadata={"static": True})
  block_last: Leaf | None = None
  windowed_last: bool = dataclasses.field(default=False, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowLayer:
  """The rows of one layer.

  Attributes:
    k: keys [B, K, W / T, H, T].
    v: values [B, K, H / E, W, E].
    places: where the tokens of a call are.
  """

  k: jax.Array
  v: jax.Array
  places: Places

  def attend(
    self,
    query: Float[Array, "T 1 N H"],
    key: Float[Array, "T 1 K H"] | None,
    value: Float[Array, "T 1 K H"] | None,
    **options: Any,
  ) -> tuple[Float[Array, "T 1 N H"], RowLayer]:
    """Writes the tokens' keys and values, and attends to the rows of their slots.

    Args:
      query: the queries of the tokens.
      key, value: keys and values of the tokens; None if they were written already.
      **options: see `cache.LayerCache.attend`.
    """
    p = self.places

    def new(x, rows):
      return x[:, 0].astype(rows.dtype)

    how = {"mode": "drop", "unique_indices": True}
    k, v = self.k, self.v
    if key is not None and value is not None:
      tile, inside = jnp.divmod(p.positions, k.shape[4])
      k = k.at[p.slots, :, tile, :, inside].set(new(key, k), **how)
      parts = new(value, v).reshape(-1, *v.shape[1:3], v.shape[4])
      v = v.at[p.slots, :, :, p.positions].set(parts, **how)
    slots, tail = k.shape[0], query.shape[2:]
    own, blocks = slots * p.width, p.block_slots.shape[0]
    out = []
    if p.width:
      queries = query[:own].reshape(slots, p.width, *tail)
      at = p.positions[:own].reshape(slots, p.width)
      out.append(_attend(queries, k, v, at, **options))
    if blocks:
      queries = query[own:].reshape(blocks, p.block_width, *tail)
      at = p.positions[own:].reshape(blocks, p.block_width)

      def take(rows):
        return jnp.take(rows, p.block_slots, axis=0, mode="clip")

      is_causal = p.windowed_last and options["window"] is None
      last = None if is_causal else p.block_last
      out.append(_attend(queries, take(k), take(v), at, last=last, **options))
    flat = jnp.concatenate([x.reshape(-1, 1, *tail) for x in out])
    return flat, dataclasses.replace(self, k=k, v=v)


def _attend(
  query: Float[Array, "R Q N H"],
  k: Float[Array, "R K W_T H T"],
  v: Float[Array, "R K H_E W E"],
  positions: Int[Array, "R Q"],
  *,
  scale: float | None,
  softcap: float | None,
  window: int | None,
  implementation: str,
  rules: ShardingRules,
  sinks: Float[Array, " N"] | None = None,
  last: Int[Array, "R Q"] | None = None,
) -> Float[Array, "R Q N H"]:
  """Returns the attention of each query to the tokens of its row up to its position.

  Or up to `last`, the last token of the image that the query belongs to.
  """
  (r, q, n, h), heads, width = query.shape, k.shape[1], v.shape[3]
  index = jnp.arange(width)
  seen = index <= (positions if last is None else last)[:, :, None]
  if window is not None:
    seen &= index > positions[:, :, None] - window
  is_invariant = implementation == "invariant"
  if (
    q * width > attention_paths.PLAIN_SCORES_ELSEWHERE  # too many to hold at once
    and not is_invariant
  ):
    return attention_paths.attend(
      query,
      k.transpose(0, 2, 4, 1, 3).reshape(r, width, heads, h).astype(query.dtype),
      v.transpose(0, 3, 1, 2, 4).reshape(r, width, heads, h).astype(query.dtype),
      Visibility(jnp.zeros(q, jnp.int32), seen),
      scale=scale,
      softcap=softcap,
      implementation=implementation,
      rules=rules,
      sinks=sinks,
    )
  # The sums over tiles, see `_of_tiles`, are fast in float32 on a CPU.
  dtype = jnp.float32 if mesh_lib.context_platform() == "cpu" else query.dtype
  with jax.named_scope("scores"):
    rows = query.reshape(r, q, heads, n // heads, h).transpose(0, 2, 3, 1, 4)
    scores = _of_tiles("rktah,rkthw->rktaw", rows.reshape(r, heads, -1, h), k, dtype)
    scores = scores.swapaxes(2, 3).reshape(r, heads, n // heads, q, width)
    factor = h**-0.5 if scale is None else scale
    scores, _ = blockwise.scaled(scores, factor, softcap, is_invariant)
    scores = jnp.where(seen[:, None, None], scores, attention_paths.NEVER)

  def of_values(weights, v):
    weights = invariant.kept(weights.astype(query.dtype), is_invariant)
    weights = weights.reshape(r, heads, -1, weights.shape[-1])
    features = v.shape[4]
    v = invariant.widened(v) if is_invariant else v
    out = _of_tiles("rkjaw,rkjwe->rkjae", weights, v, dtype)[..., :features]
    return out.swapaxes(2, 3).reshape(r, heads, n // heads, q, h)

  if is_invariant:
    by_group = None if sinks is None else sinks.reshape(heads, -1).astype(jnp.float32)
    out = _by_blocks(scores, v, of_values, by_group)
  else:
    by_group = None if sinks is None else sinks.reshape(heads, -1, 1)
    with jax.named_scope("scores"):
      weights = sink_ops.softmax(scores, by_group)
    with jax.named_scope("values"):
      out = of_values(weights, v)
  return out.transpose(0, 3, 1, 2, 4).reshape(r, q, n, h).astype(query.dtype)


def _by_blocks(
  scores: Float[Array, "R K G Q W"],
  v: Float[Array, "R K H_E W E"],
  of_values: Callable[[jax.Array, jax.Array], jax.Array],
  sinks: Float[Array, "K G"] | None,
) -> Float[Array, "R K G Q H"]:
  """Returns softmax(scores) v as the path "invariant" computes it, block by block."""
  width, size = scores.shape[-1], blockwise.INVARIANT_KEYS
  shape = (*scores.shape[:-1], v.shape[2] * v.shape[4])

  def block(j, seen):
    at = jnp.minimum(j * size, width - size)
    part = jax.lax.dynamic_slice_in_dim(scores, at, size, axis=4)
    # The last block of a width that is no multiple begins in the block before it.
    is_new = at + jnp.arange(size) >= j * size
    part = jnp.where(is_new, part, blockwise.HIDDEN)
    values = jax.lax.dynamic_slice_in_dim(v, at, size, axis=3)
    return blockwise.with_keys(seen, part, lambda w: of_values(w, values), True)

  seen = blockwise.no_keys(shape, sinks)
  if width <= size:
    seen = blockwise.with_keys(seen, scores, lambda w: of_values(w, v), True)
  else:
    seen = jax.lax.fori_loop(0, -(-width // size), block, seen)
  _, total, out = seen
  return out / jnp.where(total > 0, total, 1.0)[..., None]


def _of_tiles(
  spec: str,
  rows: Float[Array, "R K A B"],
  tiles: Float[Array, "R K J B C"],
  dtype: DTypeLike,
) -> Float[Array, "R K J A C"]:
  """Returns the products of rows with each tile, float32.

  Args:
    spec: the products as an einsum in which each tile has rows of its own.
    rows: the rows.
    tiles: the tiles.
    dtype: dtype in which they are multiplied.
  """
  rows, tiles = rows.astype(dtype), tiles.astype(dtype)
  if mesh_lib.context_platform() == "cpu":
    # With einsum, XLA's CPU backend would compute the rows again for each tile. This
    # sum becomes products of matrices, in which the tiles share the rows. XLA does not
    # do this for a single row, so a single row is doubled.
    count = rows.shape[2]
    rows = jnp.concatenate([rows, rows], axis=2) if count == 1 else rows
    out = jnp.sum(rows[:, :, None, :, :, None] * tiles[:, :, :, None], axis=4)
    return out[:, :, :, :count]
  rows = jnp.broadcast_to(rows[:, :, None], (*tiles.shape[:3], *rows.shape[2:]))
  return jnp.einsum(spec, rows, tiles, preferred_element_type=jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Store:
  """Keys and values of all layers.

  Attributes:
    rows_k, rows_v: one array per layer, see `RowLayer`. Their dtype is `stored_dtype`.
    pages_k: keys [P, K, 1, H, page], one array per layer.
    pages_v: values [P, K, H / E, page, E], one array per layer.
    groups: group of each layer, see scheduling/layer_groups.py.
  """

  rows_k: tuple[jax.Array, ...]
  rows_v: tuple[jax.Array, ...]
  pages_k: tuple[jax.Array, ...]
  pages_v: tuple[jax.Array, ...]
  groups: tuple[int, ...] = dataclasses.field(metadata={"static": True})

  @property
  def width(self) -> int:
    """Tokens W of a row."""
    return self.rows_v[0].shape[3]

  def of_width(self, width: int) -> Store:
    """Returns a copy with rows of `width` tokens; the leaves must be shapes."""

    def keys(x):
      shape = *x.shape[:2], width // x.shape[4], *x.shape[3:]
      return jax.ShapeDtypeStruct(shape, x.dtype, sharding=x.sharding)

    def values(x):
      shape = *x.shape[:3], width, x.shape[4]
      return jax.ShapeDtypeStruct(shape, x.dtype, sharding=x.sharding)

    rows_k, rows_v = map(keys, self.rows_k), map(values, self.rows_v)
    return dataclasses.replace(self, rows_k=tuple(rows_k), rows_v=tuple(rows_v))

  def at(self, places: Places) -> RowCache:
    """Returns the cache of a call of the model."""
    return RowCache(self.rows_k, self.rows_v, places)

  def after(self, cache: RowCache) -> Store:
    """Returns the store with the rows that a call of the model returned."""
    return dataclasses.replace(self, rows_k=cache.k, rows_v=cache.v)

  def forked(self, sources: jax.Array) -> Store:
    """Returns the store unchanged: pages of a fork are copied before a launch."""
    del sources
    return self

  def settled(self, model: Any, counts: jax.Array) -> Store:
    """Returns the store unchanged: keys of wrong drafts are overwritten later."""
    del model, counts
    return self


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
    return self.v[0].shape[3]

  def layer(self, number: int) -> RowLayer:
    """Returns the cache of one layer."""
    return RowLayer(self.k[number], self.v[number], self.places)

  def replaced(self, layers: Sequence[RowLayer], tokens: int) -> RowCache:
    """Returns the cache after a call that wrote `tokens` tokens to each layer."""
    del tokens
    k, v = tuple(x.k for x in layers), tuple(x.v for x in layers)
    return dataclasses.replace(self, k=k, v=v)


def load(store: Store, copies: Int[Array, "n G 2"], count, loads, load_count) -> Store:
  """Copies pages, and then fills parts of rows from pages.

  Args:
    store: the store; its buffers are donated.
    copies: (from, to) page numbers of each group; the first `count` are used.
    count: int32 scalar.
    loads: int32 [m, 2 + G], (slot, page of the row, page numbers of the groups); the
      first `load_count` are used. Page 0 stands for a page that no query sees.
    load_count: int32 scalar.
  """
  size = store.pages_v[0].shape[3]

  def copy(i, arrays):
    def one(pages, group):
      return jax.lax.dynamic_update_index_in_dim(
        pages, pages[copies[i, group, 0]], copies[i, group, 1], 0
      )

    return tuple(tuple(map(one, layers, store.groups)) for layers in arrays)

  pages = store.pages_k, store.pages_v
  pages = jax.lax.fori_loop(0, count, copy, pages)

  def fill(i, rows):
    slot, place, numbers = loads[i, 0], loads[i, 1], loads[i, 2:]

    def keys(row, source, group):
      return jax.lax.dynamic_update_slice(
        row,
        source[numbers[group]][None].astype(row.dtype),
        _key_place(row, slot, place * size),
      )

    def values(row, source, group):
      return jax.lax.dynamic_update_slice(
        row,
        source[numbers[group]][None].astype(row.dtype),
        (slot, 0, 0, place * size, 0),
      )

    return (
      tuple(map(keys, rows[0], pages[0], store.groups)),
      tuple(map(values, rows[1], pages[1], store.groups)),
    )

  rows = store.rows_k, store.rows_v
  rows = jax.lax.fori_loop(0, load_count, fill, rows)
  return Store(*rows, *pages, groups=store.groups)


def write_back(store: Store, writes: Int[Array, "m C"], count) -> Store:
  """Writes parts of rows to pages.

  Args:
    store: the store; its buffers are donated.
    writes: int32 [m, 2 + G], (slot, page of the row, page numbers of the groups); the
      first `count` are used.
    count: int32 scalar.
  """
  size = store.pages_v[0].shape[3]

  def write(i, pages):
    slot, place, numbers = writes[i, 0], writes[i, 1], writes[i, 2:]

    def moved(target, row, start, group):
      part = jax.lax.dynamic_slice(row, start, (1, *target.shape[1:]))
      part = part.astype(target.dtype)
      return jax.lax.dynamic_update_slice(target, part, (numbers[group], 0, 0, 0, 0))

    def keys(target, row, group):
      return moved(target, row, _key_place(row, slot, place * size), group)

    def values(target, row, group):
      return moved(target, row, (slot, 0, 0, place * size, 0), group)

    return (
      tuple(map(keys, pages[0], store.rows_k, store.groups)),
      tuple(map(values, pages[1], store.rows_v, store.groups)),
    )

  pages = (store.pages_k, store.pages_v)
  pages = jax.lax.fori_loop(0, count, write, pages)
  return Store(store.rows_k, store.rows_v, *pages, groups=store.groups)


def _key_place(row: jax.Array, slot: jax.Array, token: jax.Array) -> tuple[Any, ...]:
  """Returns the start, in all axes, of a page's keys; `token` is its first token."""
  tile, inside = jnp.divmod(token, row.shape[4])
  return slot, 0, tile, 0, inside


def tile_tokens(page_tokens: int) -> int:
  """Returns the tokens T of a tile of keys: all pages that fit in 32, at least one."""
  return page_tokens * max(1, 32 // page_tokens)


def stored_dtype(dtype: DTypeLike) -> jnp.dtype:
  """Returns the dtype of rows for a model that computes in `dtype`.

  XLA's CPU backend converts whole arrays of bfloat16 to float32 and back to write a few
  numbers, so there rows are float32. Their numbers are those of the pages.
  """
  is_half = jnp.dtype(dtype) == jnp.bfloat16
  is_single = is_half and mesh_lib.context_platform() == "cpu"
  return jnp.dtype(jnp.float32 if is_single else dtype)


def tile_features(head_dim: int) -> int:
  """Returns the features E of a tile of values."""
  return 64 if head_dim % 64 == 0 else head_dim
