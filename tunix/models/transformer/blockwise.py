"""Attention whose memory is linear in the length: one block of scores at a time.

The recurrences of FlashAttention (Dao et al. 2022, arXiv:2205.14135) in plain XLA, so
they run everywhere: for each block of queries a loop over the key blocks within its
reach keeps the running maximum and the running sum of the softmax; the backward pass
computes every block of scores again from the saved log-sum-exp. Key blocks that nobody
in the block of queries may look at (future, out of the window, of other segments,
closed by the mask) are not visited: the loops' bounds are computed from the indices.

Forward-mode differentiation (jvp, Hessians) is not defined: the plain path has it.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tunix.models.transformer.visibility import Tokens, Visibility, may_look, reach

# Scores of hidden keys, and what the running maximum starts from: above the first, so
# that a row that has seen nothing yet weighs hidden keys exp(HIDDEN - FLOOR) = 0.
_HIDDEN = -1e30
_FLOOR = -1e29


@dataclasses.dataclass(frozen=True)
class _Rule:
  """What is fixed when a program is traced."""

  scale: float
  softcap: float | None
  window: int | None
  sizes: tuple[int, int]  # queries and keys of a block


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Where:
  """What the masks are made from; `first` and `last` bound each query block's keys."""

  queries: Tokens  # cut into blocks: index [n, q], the others [n, B, q]
  keys: Tokens
  mask: jax.Array | None  # [B, n * q, m * k]
  first: jax.Array
  last: jax.Array


def attend(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K H"],
  visible: Visibility,
  *,
  scale: float,
  softcap: float | None = None,
  window: int | None = None,
  query_block: int = 256,
  key_block: int = 256,
) -> Float[Array, "B T N H"]:
  """softmax(scores) v with memory of order B N (T H + query_block * key_block).

  Args:
    scale, softcap, window: as in `attention_paths.attend`.
    query_block, key_block: most queries and keys of a block of scores.

  Returns: the values looked at, in value's dtype; 0 in rows that may look nowhere.
  """
  b, t, n, h = query.shape
  s, k = key.shape[1:3]
  sizes = block_size(t, query_block), block_size(s, key_block)
  rule = _Rule(scale, softcap, window, sizes)
  where = _cut_visibility(visible, rule, s)
  blocks = _cut(query, sizes[0], 1)  # [n, B, q, N, H]
  queries = blocks.reshape(*blocks.shape[:3], k, n // k, h).transpose(0, 1, 3, 4, 2, 5)
  keys, values = (_cut(x, sizes[1], 1).swapaxes(2, 3) for x in (key, value))
  out: jax.Array = _attend(rule, queries, keys, values, where)
  out = out.transpose(1, 0, 4, 2, 3, 5).reshape(b, -1, n, h)
  return out[:, :t]


def block_size(length: int, most: int) -> int:
  """The size of equal blocks, at most `most` each, so that little is padded.

  A multiple of 128 (a TPU's lanes) where `most` is one and the length exceeds it.
  """
  count = math.ceil(length / most)
  multiple = 128 if most % 128 == 0 and length > 128 else 1
  return min(most, math.ceil(length / count / multiple) * multiple)


def _cut(x: jax.Array, size: int, axis: int, mode: str = "constant") -> jax.Array:
  """Pads an axis and cuts it into blocks, which come first."""
  short = -x.shape[axis] % size
  x = jnp.pad(x, [(0, short if i == axis else 0) for i in range(x.ndim)], mode=mode)
  shape = (*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
  return jnp.moveaxis(x.reshape(shape), axis, 0)


def _cut_tokens(tokens: Tokens, size: int) -> Tokens:
  cut = lambda x: None if x is None else _cut(x, size, 1)
  # "edge": padded queries must not widen what their block looks at.
  index = _cut(tokens.index, size, 0, "edge")
  return Tokens(index, cut(tokens.segments), cut(tokens.groups))


def _cut_visibility(visible: Visibility, rule: _Rule, keys: int) -> _Where:
  """Cuts the indices into blocks and bounds the keys that each block looks at."""
  size, key_size = rule.sizes
  key_tokens = visible.keys(keys)
  first, last = reach(visible.queries(), key_tokens, rule.window)
  low = jnp.min(_cut(first, size, 1, "edge"), axis=(1, 2)) // key_size
  high = jnp.max(_cut(last, size, 1, "edge"), axis=(1, 2)) // key_size + 1
  mask = visible.mask
  if mask is not None:
    short = (0, 0), (0, -mask.shape[1] % size), (0, -mask.shape[2] % key_size)
    mask = jnp.pad(mask.astype(bool), short)
    open_low, open_high = _bounds(mask, rule.sizes)
    if visible.groups is None:
      low, high = jnp.maximum(low, open_low), open_high
    else:  # a group opens what the mask closes
      high = jnp.maximum(high, open_high)
  # Slots beyond the last key are nobody's: later than every query, in no group.
  key_tokens = _cut_tokens(key_tokens, key_size)
  slots = jnp.arange(key_tokens.index.size, dtype=jnp.int32)
  key_tokens = dataclasses.replace(key_tokens, index=slots.reshape(-1, key_size))
  return _Where(_cut_tokens(visible.queries(), size), key_tokens, mask, low, high)


def _bounds(mask: jax.Array, sizes: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
  """The range of key blocks in which the mask leaves anything open, by query block."""
  b, t, s = mask.shape
  blocks = mask.reshape(b, t // sizes[0], sizes[0], s // sizes[1], sizes[1])
  used = jnp.any(blocks, axis=(0, 2, 4))
  numbers = jnp.arange(used.shape[1], dtype=jnp.int32)
  first = jnp.min(jnp.where(used, numbers, used.shape[1]), axis=1)
  return first, jnp.max(jnp.where(used, numbers + 1, 0), axis=1)


def _allowed(rule: _Rule, where: _Where, i: jax.Array, j: jax.Array) -> jax.Array:
  """bool [B, 1, 1, q, k]: the mask of one block of scores."""
  queries = jax.tree.map(lambda x: x[i], where.queries)
  keys = jax.tree.map(lambda x: x[j], where.keys)
  mask = where.mask
  if mask is not None:
    at = (0, i * rule.sizes[0], j * rule.sizes[1])
    mask = jax.lax.dynamic_slice(mask, at, (mask.shape[0], *rule.sizes))
  return may_look(queries, keys, mask, rule.window)[:, None, None]


def _scores(rule, query, key, allowed):
  """float32 [B, K, G, q, k], hidden keys at _HIDDEN; and the soft cap's slope."""
  with jax.named_scope("scores"):
    raw = jnp.einsum(
      "bkgth,bksh->bkgts", query, key, preferred_element_type=jnp.float32
    )
    raw, slope = raw * rule.scale, None
    if rule.softcap is not None:
      bent = jnp.tanh(raw / rule.softcap)
      raw, slope = bent * rule.softcap, 1 - bent * bent
    return jnp.where(allowed, raw, _HIDDEN), slope


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(rule, query, key, value, where):
  return _forward(rule, query, key, value, where)[0]


def _forward(rule, query, key, value, where):
  """Outputs [n, B, K, G, q, H] and the log-sum-exp of every query's scores."""

  def query_block(i):
    q = query[i]

    def key_block(j, carry):
      top, total, out = carry
      scores, _ = _scores(rule, q, key[j], _allowed(rule, where, i, j))
      new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
      weights = jnp.exp(scores - new_top[..., None])
      shrink = jnp.exp(top - new_top)
      total = total * shrink + jnp.sum(weights, axis=-1)
      with jax.named_scope("values"):
        more = _product("bkgts,bksh->bkgth", weights.astype(value.dtype), value[j])
      return new_top, total, out * shrink[..., None] + more

    none = jnp.zeros(q.shape[:-1], jnp.float32)
    start = none + _FLOOR, none, jnp.zeros(q.shape, jnp.float32)
    top, total, out = jax.lax.fori_loop(where.first[i], where.last[i], key_block, start)
    safe = jnp.where(total > 0, total, 1.0)
    # 0 where nothing was seen: there the backward pass weighs exp(_HIDDEN - 0) = 0.
    norm = jnp.where(total > 0, top + jnp.log(safe), 0.0)
    return (out / safe[..., None]).astype(value.dtype), norm

  return jax.lax.map(query_block, jnp.arange(query.shape[0]))


def _save(rule, query, key, value, where):
  out, norm = _forward(rule, query, key, value, where)
  return out, (query, key, value, where, out, norm)


def _backward(rule, saved, d_out):
  """Gradients by queries, keys and values; those of keys and values grow in place."""
  query, key, value, where, out, norm = saved

  def query_block(grown, i):
    q, d_o = query[i], d_out[i]
    pull = jnp.sum(d_o.astype(jnp.float32) * out[i].astype(jnp.float32), axis=-1)

    def key_block(j, carry):
      d_q, d_key, d_value = carry
      scores, slope = _scores(rule, q, key[j], _allowed(rule, where, i, j))
      weights = jnp.exp(scores - norm[i][..., None])
      d_v = _product("bkgts,bkgth->bksh", weights.astype(value.dtype), d_o)
      d_weights = _product("bkgth,bksh->bkgts", d_o, value[j])
      d_scores = weights * (d_weights - pull[..., None]) * rule.scale
      if slope is not None:
        d_scores = d_scores * slope
      d_scores = d_scores.astype(query.dtype)
      d_q = d_q + _product("bkgts,bksh->bkgth", d_scores, key[j])
      d_k = _product("bkgts,bkgth->bksh", d_scores, q)
      return d_q, d_key.at[j].add(d_k), d_value.at[j].add(d_v)

    start = jnp.zeros(q.shape, jnp.float32), *grown
    bounds = where.first[i], where.last[i]
    d_q, *grown = jax.lax.fori_loop(*bounds, key_block, start)
    return tuple(grown), d_q.astype(query.dtype)

  empty = jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32)
  numbers = jnp.arange(query.shape[0])
  (d_key, d_value), d_query = jax.lax.scan(query_block, empty, numbers)
  return d_query, d_key.astype(key.dtype), d_value.astype(value.dtype), None


_attend.defvjp(_save, _backward)


def _product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """An einsum that adds up in float32."""
  return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)
