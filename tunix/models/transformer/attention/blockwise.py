"""Attention with memory linear in the length: one block of scores at a time.

It follows FlashAttention (Dao et al. 2022, arXiv:2205.14135) in plain XLA, so it runs
on every platform. For each block of queries a loop over key blocks keeps the running
maximum and the running sum of the softmax. The backward pass recomputes every block of
scores from the saved log-sum-exp. The bounds of the loop over key blocks are computed
from the indices, so that it skips blocks before the first and after the last key that a
query of the block attends to (later tokens, other segments, keys outside the window or
closed by the mask).

Forward-mode differentiation (jvp, Hessians) is not supported; the plain path supports
it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array, Float

from tunix.models.transformer.visibility import Tokens, Visibility, is_visible, reach
from tunix.ops.vocabulary import invariant
from tunix.perf import flops, hlo_flops

# Score of a hidden key, and initial value of the running maximum. The initial value is
# larger. As long as a query has seen no visible key, a hidden key therefore gets the
# weight exp(HIDDEN - _FLOOR) = 0. With equal values the weight would be exp(0) = 1.
HIDDEN = -1e30
_FLOOR = -1e29

# The largest score of each query, the sum of its weights, and the weighted values.
Seen = tuple[jax.Array, jax.Array, jax.Array]

# Keys of a block in the path "invariant", in trainers and in the engine.
INVARIANT_KEYS = 256


@dataclasses.dataclass(frozen=True)
class _Options:
  """Options that are static: each combination compiles a new program."""

  scale: float
  softcap: float | None
  window: int | None
  sizes: tuple[int, int]  # queries and keys of a block
  passes: float | None  # key blocks of a query block on average; None: not known
  is_invariant: bool = False  # see `attend`

  def operands(self, *arrays: jax.Array) -> list[jax.Array]:
    """Returns the arrays as they are multiplied.

    Products of bfloat16 have other bits than those of float32, which the engine makes.
    """
    return [x.astype(jnp.float32) if self.is_invariant else x for x in arrays]

  def annotation(self) -> Any:
    """Returns a context that annotates loops over key blocks, see `hlo_flops`."""
    if self.passes is None:
      return contextlib.nullcontext()
    return set_xla_metadata(**{hlo_flops.PASSES: str(self.passes)})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _BlockIndex:
  """Indices from which the mask of each block is computed."""

  queries: Tokens  # cut into n blocks: index [n, q], the others [n, B, q]
  keys: Tokens  # cut into m blocks
  mask: jax.Array | None  # [B, n * q, m * k]
  first: jax.Array  # [n], the first key block of each query block
  last: jax.Array  # [n], the key block after its last one


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
  sinks: Float[Array, " N"] | None = None,
  is_invariant: bool = False,
) -> Float[Array, "B T N H"]:
  """Returns softmax(scores) v, with O(B N (T H + query_block * key_block)) memory.

  Args:
    query, key, value, visible, scale, softcap, window, sinks: see
      `attention_paths.attend`.
    query_block, key_block: largest numbers of queries and keys in a block of scores.
    is_invariant: if True, the bits of a query's output depend only on the query, on the
      keys before it and on their slots, on a CPU.

  Returns:
    The output in value's dtype; 0 for a query without a visible key.
  """
  b, t, n, h = query.shape
  s, k = key.shape[1:3]
  sizes = block_size(t, query_block), block_size(s, key_block)
  if is_invariant:
    # XLA multiplies a single row, and numbers of keys with a rest, in another order.
    sizes = max(2, sizes[0]), sizes[1] + -sizes[1] % 64
  passes = None if visible.mask is not None else _mean_passes(s, window, sizes[1])
  options = _Options(scale, softcap, window, sizes, passes, is_invariant)
  index = _cut_visibility(visible, options, s)
  blocks = _cut(query, sizes[0], 1)  # [n, B, q, N, H]
  # The N query heads become K groups of G = N / K, one group per key head:
  # [n, B, K, G, q, H].
  queries = blocks.reshape(*blocks.shape[:3], k, n // k, h).transpose(0, 1, 3, 4, 2, 5)
  keys, values = (_cut(x, sizes[1], 1).swapaxes(2, 3) for x in (key, value))
  by_group = None if sinks is None else sinks.astype(jnp.float32).reshape(k, n // k)
  out: jax.Array = _attend(options, queries, keys, values, index, by_group)
  out = out.transpose(1, 0, 4, 2, 3, 5).reshape(b, -1, n, h)
  return out[:, :t]


def block_size(length: int, largest: int) -> int:
  """Returns the size of equal blocks that need little padding.

  For example, 300 elements in blocks of at most 200 give 2 blocks of 150.

  Args:
    length: number of elements to cut.
    largest: largest size of a block. If it is a multiple of 128, a TPU's lanes, and the
      length exceeds 128, the result is a multiple of 128 too.
  """
  count = math.ceil(length / largest)
  multiple = 128 if largest % 128 == 0 and length > 128 else 1
  return min(largest, math.ceil(length / count / multiple) * multiple)


def _mean_passes(keys: int, window: int | None, size: int) -> float:
  """Returns the key blocks that a causal query block needs at least, on average.

  Rows count as one segment each.
  """
  pairs = flops.attended_pairs(keys, window=window)
  return max(1.0, pairs / keys / size)


def _cut(x: jax.Array, size: int, axis: int, mode: str = "constant") -> jax.Array:
  """Pads an axis and cuts it into blocks; the axis of blocks comes first."""
  short = -x.shape[axis] % size
  x = jnp.pad(x, [(0, short if i == axis else 0) for i in range(x.ndim)], mode=mode)
  shape = (*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
  return jnp.moveaxis(x.reshape(shape), axis, 0)


def _cut_tokens(tokens: Tokens, size: int) -> Tokens:
  def cut(x):
    return None if x is None else _cut(x, size, 1)

  # "edge" repeats the last slot. Padding with 0 would widen the range of slots in the
  # last block, and fewer key blocks could be skipped.
  index = _cut(tokens.index, size, 0, "edge")
  return Tokens(index, cut(tokens.segments), cut(tokens.groups))


def _cut_visibility(visible: Visibility, options: _Options, keys: int) -> _BlockIndex:
  """Cuts the indices into blocks, and computes the range of keys of each block."""
  size, key_size = options.sizes
  key_tokens = visible.keys(keys)
  first, last = reach(visible.queries(), key_tokens, options.window)
  # One range for all rows: the loop bounds of a block are scalars. `last` is included
  # and `high` is not, hence + 1.
  low = jnp.min(_cut(first, size, 1, "edge"), axis=(1, 2)) // key_size
  high = jnp.max(_cut(last, size, 1, "edge"), axis=(1, 2)) // key_size + 1
  mask = visible.mask
  if mask is not None:
    short = (0, 0), (0, -mask.shape[1] % size), (0, -mask.shape[2] % key_size)
    mask = jnp.pad(mask.astype(bool), short)
    open_low, open_high = _bounds(mask, options.sizes)
    # The mask replaces the causal order, so its upper bound replaces the causal one.
    if visible.groups is None:
      low, high = jnp.maximum(low, open_low), open_high
    else:  # a group opens pairs that the mask closes, so no bound may be narrowed
      high = jnp.maximum(high, open_high)
  # Padded keys get slots after every query, group 0, and False in the mask, so no query
  # attends to them.
  key_tokens = _cut_tokens(key_tokens, key_size)
  slots = jnp.arange(key_tokens.index.size, dtype=jnp.int32)
  key_tokens = dataclasses.replace(key_tokens, index=slots.reshape(-1, key_size))
  queries = _cut_tokens(visible.queries(), size)
  return _BlockIndex(queries, key_tokens, mask, low, high)


def _bounds(mask: jax.Array, sizes: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
  """Returns the range of key blocks that the mask opens for each query block.

  Returns:
    The first key block with a True entry and the block after the last one, int32 [n]
    each; (m, 0) if the mask has no True entry for the query block.
  """
  b, t, s = mask.shape
  blocks = mask.reshape(b, t // sizes[0], sizes[0], s // sizes[1], sizes[1])
  used = jnp.any(blocks, axis=(0, 2, 4))
  numbers = jnp.arange(used.shape[1], dtype=jnp.int32)
  first = jnp.min(jnp.where(used, numbers, used.shape[1]), axis=1)
  return first, jnp.max(jnp.where(used, numbers + 1, 0), axis=1)


def _block_mask(
  options: _Options, index: _BlockIndex, i: jax.Array, j: jax.Array
) -> jax.Array:
  """Returns the mask of one block of scores, bool [B, 1, 1, q, k]."""
  queries = jax.tree.map(lambda x: x[i], index.queries)
  keys = jax.tree.map(lambda x: x[j], index.keys)
  mask = index.mask
  if mask is not None:
    at = (0, i * options.sizes[0], j * options.sizes[1])
    mask = jax.lax.dynamic_slice(mask, at, (mask.shape[0], *options.sizes))
  return is_visible(queries, keys, mask, options.window)[:, None, None]


def _scores(options, query, key, mask):
  """Returns scores, float32 [B, K, G, q, k], and the derivative of the soft cap.

  Hidden keys have the score HIDDEN. Without a soft cap the derivative is None.
  """
  with jax.named_scope("scores"):
    raw = _product("bkgth,bksh->bkgts", *options.operands(query, key))
    raw, slope = scaled(raw, options.scale, options.softcap, options.is_invariant)
    return jnp.where(mask, raw, HIDDEN), slope


def scaled(
  scores: jax.Array, scale: float, softcap: float | None, is_invariant: bool = False
) -> tuple[jax.Array, jax.Array | None]:
  """Returns scores with their factor and soft cap, and the derivative of the cap."""
  times = invariant.product if is_invariant else operator.mul
  scores = times(scores, scale)
  if softcap is None:
    return scores, None
  tanh = jnp.tanh(times(scores, 1 / softcap) if is_invariant else scores / softcap)
  return times(tanh, softcap), 1 - tanh * tanh


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options, query, key, value, index, sinks):
  return _forward(options, query, key, value, index, sinks)[0]


def _forward(options, query, key, value, index, sinks):
  """Returns outputs [n, B, K, G, q, H] and the log-sum-exp of every query's scores.

  With the running maximum m and sum s, a key block with scores x gives
  m' = max(m, x), s' = s exp(m - m') + sum exp(x - m'), and the output is rescaled by
  exp(m - m') in the same way. The division by s follows after the last block. A sink
  is a key without a value: the loop starts with its score as m, and s = 1.
  """

  def query_block(i):
    q = query[i]

    def key_block(j, carry):
      scores, _ = _scores(options, q, key[j], _block_mask(options, index, i, j))

      def of_values(weights):
        weights = invariant.kept(weights.astype(value.dtype), options.is_invariant)
        values = value[j]
        if options.is_invariant:
          values = invariant.widened(values)
        operands = options.operands(weights, values)
        return _product("bkgts,bksh->bkgth", *operands)[..., : value.shape[-1]]

      return with_keys(carry, scores, of_values, options.is_invariant)

    start = no_keys(q.shape, sinks)
    bounds = index.first[i], index.last[i]
    with options.annotation():
      top, total, out = jax.lax.fori_loop(*bounds, key_block, start)
    safe = jnp.where(total > 0, total, 1.0)
    # 0 for a query without a visible key: its weights in the backward pass are then
    # exp(HIDDEN - 0) = 0, and its gradient is finite.
    norm = jnp.where(total > 0, top + jnp.log(safe), 0.0)
    return (out / safe[..., None]).astype(value.dtype), norm

  return jax.lax.map(query_block, jnp.arange(query.shape[0]))


def no_keys(shape: tuple[int, ...], sinks: jax.Array | None) -> Seen:
  """Returns the softmax over no keys, or over sinks [K, G].

  Args:
    shape: shape of the queries, [B, K, G, q, H].
    sinks: see `attend`, float32 [K, G].
  """
  zeros, out = jnp.zeros(shape[:-1], jnp.float32), jnp.zeros(shape, jnp.float32)
  if sinks is not None:
    return zeros + sinks[..., None], zeros + 1, out
  return zeros + _FLOOR, zeros, out


def with_keys(
  seen: Seen,
  scores: Float[Array, "B K G q k"],
  of_values: Callable[[jax.Array], jax.Array],
  is_invariant: bool = False,
) -> Seen:
  """Returns the softmax with further keys.

  Args:
    seen: the softmax so far.
    scores: scores of the keys; HIDDEN for those that a query does not see.
    of_values: multiplies weights [B, K, G, q, k] by the values, in float32.
    is_invariant: see `attend`.
  """
  top, total, out = seen
  new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
  weights = jnp.exp(scores - new_top[..., None])
  shrink = jnp.exp(top - new_top)
  added = invariant.total(weights) if is_invariant else jnp.sum(weights, axis=-1)
  times = invariant.product if is_invariant else operator.mul
  total = times(total, shrink) + added
  with jax.named_scope("values"):
    added = of_values(weights)
  return new_top, total, times(out, shrink[..., None]) + added


def _save(options, query, key, value, index, sinks):
  out, norm = _forward(options, query, key, value, index, sinks)
  return out, (query, key, value, index, sinks, out, norm)


def _backward(options, saved, d_out):
  """Returns the gradients of queries, keys, values and sinks.

  With scores x and weights w = exp(x - logsumexp), the gradients are dv = w^T do and
  dx = w (do v^T - sum(do o)), where do is the cotangent of the output o. The gradients
  of keys and values are accumulated in place, over the query blocks. The log-sum-exp
  includes the sink, so these formulas hold with and without it. A sink has the weight
  w0 = exp(sink - logsumexp) and the value 0, so its gradient is -w0 sum(do o).
  """
  query, key, value, index, sinks, out, norm = saved

  def query_block(accumulated, i):
    q, d_o = query[i], d_out[i]
    row_sum = jnp.sum(d_o.astype(jnp.float32) * out[i].astype(jnp.float32), axis=-1)

    def key_block(j, carry):
      d_q, d_key, d_value = carry
      scores, slope = _scores(options, q, key[j], _block_mask(options, index, i, j))
      weights = jnp.exp(scores - norm[i][..., None])
      d_v = _product("bkgts,bkgth->bksh", weights.astype(value.dtype), d_o)
      d_weights = _product("bkgth,bksh->bkgts", d_o, value[j])
      d_scores = weights * (d_weights - row_sum[..., None]) * options.scale
      if slope is not None:
        d_scores = d_scores * slope
      d_scores = d_scores.astype(query.dtype)
      d_q = d_q + _product("bkgts,bksh->bkgth", d_scores, key[j])
      d_k = _product("bkgts,bkgth->bksh", d_scores, q)
      return d_q, d_key.at[j].add(d_k), d_value.at[j].add(d_v)

    start = jnp.zeros(q.shape, jnp.float32), *accumulated
    bounds = index.first[i], index.last[i]
    with options.annotation():
      d_q, *accumulated = jax.lax.fori_loop(*bounds, key_block, start)
    return tuple(accumulated), d_q.astype(query.dtype)

  empty = jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32)
  numbers = jnp.arange(query.shape[0])
  (d_key, d_value), d_query = jax.lax.scan(query_block, empty, numbers)
  d_sinks = None if sinks is None else _sink_gradient(sinks, norm, out, d_out)
  return d_query, d_key.astype(key.dtype), d_value.astype(value.dtype), None, d_sinks


def _sink_gradient(sinks, norm, out, d_out):
  """Returns the gradient of sinks [K, G], given [n, B, K, G, q] and [..., H]."""
  row_sum = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
  return -jnp.sum(jnp.exp(sinks[..., None] - norm) * row_sum, axis=(0, 1, 4))


_attend.defvjp(_save, _backward)


def _product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns an einsum with float32 accumulation and result."""
  return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)
