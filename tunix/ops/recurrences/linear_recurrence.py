"""Linear recurrences with one state per head, by tokens and by chunks of tokens.

A head has a state S, a matrix that begins as zeros. Token t multiplies the state by its
decay exp(g_t), g_t <= 0, then changes it by a rule of its own and reads an output. The
rules of gated delta nets and of Mamba-2 are in delta_rule.py and state_space.py. The
heads are in groups, and the H / G heads of a group share vectors such as keys.

`by_tokens` runs one token at a time. `by_chunks` runs C tokens at a time: products of
matrices inside a chunk, the state between chunks. Its work and its memory grow linearly
with T.

A token that begins a segment (`starts`) sees no state of earlier tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Vectors = Float[Array, "B T G K"]
Values = Float[Array, "B T H *V"]
Decays = Float[Array, "B T H"]
State = Float[Array, "B H X Y"]
Starts = Bool[Array, "B T"]

# (decayed state [B, H, X, Y], vectors [B, H, K], values [B, H, *V]) to (state after the
# token, output [B, H, V]).
TokenRule = Callable[
  [jax.Array, Sequence[jax.Array], Sequence[jax.Array]], tuple[jax.Array, jax.Array]
]
# (state before the chunk [B, G, R, X, Y], decay [B, G, R, C, C], old [B, G, R, C],
# vectors [B, G, C, K], values [B, G, R, C, *V]) to (state after the chunk, outputs
# [B, G, R, C, V]); R = H / G. `decay` and `old` are those of `decays`.
ChunkRule = Callable[
  [
    jax.Array,
    jax.Array,
    jax.Array,
    Sequence[jax.Array],
    Sequence[jax.Array],
  ],
  tuple[jax.Array, jax.Array],
]


def by_tokens(
  rule: TokenRule,
  state: State,
  g: Decays,
  vectors: Sequence[Vectors],
  values: Sequence[Values],
  starts: Starts | None = None,
) -> tuple[Float[Array, "B T H V"], State]:
  """Returns the outputs and the state after the last token.

  Args:
    rule: runs a token.
    state: state before the first token.
    g: logarithms of the decays, at most 0.
    vectors: arrays of G groups.
    values: arrays of H heads.
    starts: True at tokens that begin a segment; None for none.
  """
  heads = g.shape[2]

  def token(state, inputs):
    g, fresh, vectors, values = inputs
    vectors = [jnp.repeat(x, heads // x.shape[1], axis=1) for x in vectors]
    keep = jnp.where(fresh[:, None], 0.0, jnp.exp(g))
    return rule(keep[..., None, None] * state, vectors, values)

  inputs = g, _fresh(g, starts), list(vectors), list(values)
  first = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs)
  last, y = jax.lax.scan(token, state, first)
  return jnp.moveaxis(y, 0, 1), last


def by_chunks(
  rule: ChunkRule,
  state: State,
  g: Decays,
  vectors: Sequence[Vectors],
  values: Sequence[Values],
  starts: Starts | None = None,
  *,
  chunk: int,
) -> tuple[Float[Array, "B T H V"], State]:
  """Returns what `by_tokens` returns, computed in chunks.

  The last chunk is filled up with zeros. A rule must leave the state as it is at a
  token whose decay, vectors and values are 0. The backward pass keeps the state before
  each chunk and computes the rest of a chunk again.

  Args:
    rule: runs a chunk.
    state, g, vectors, values, starts: see `by_tokens`.
    chunk: number C of tokens of a chunk. Rows with fewer tokens are one chunk, whose
      size is the next power of 2.
  """
  (rows, length, heads), groups = g.shape, vectors[0].shape[2]
  chunk = min(chunk, 1 << (length - 1).bit_length())
  padding = -length % chunk

  def cut(x):
    """Returns the chunks [T / C, B, C, ...] of [B, T, ...]."""
    x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(rows, -1, chunk, *x.shape[2:]), 1, 0)

  def by_group(x):
    return x.reshape(*x.shape[:2], groups, -1, *x.shape[3:])

  def each(x):
    return jnp.moveaxis(cut(by_group(x)), 2, 4)  # [T / C, B, G, R, C, ...]

  def shared(x):
    return jnp.moveaxis(cut(x), 2, 3)  # [T / C, B, G, C, K]

  @jax.checkpoint
  def step(state, inputs):
    g, fresh, vectors, values = inputs
    return rule(state, *decays(g, fresh), vectors, values)

  inputs = (
    each(g),
    cut(_fresh(g, starts)),
    [*map(shared, vectors)],
    [*map(each, values)],
  )
  first = state.reshape(rows, groups, -1, *state.shape[2:])
  last, y = jax.lax.scan(step, first, inputs)
  # [T / C, B, G, R, C, V] to [B, T, H, V]
  y = jnp.moveaxis(y, (0, 4), (1, 2)).reshape(rows, -1, heads, y.shape[-1])
  return y[:, :length], last.reshape(state.shape)


def decays(
  g: Float[Array, "B G R C"], fresh: Bool[Array, "B C"]
) -> tuple[Float[Array, "B G R C C"], Float[Array, "B G R C"]]:
  """Returns the decays between the tokens of a chunk, and from before the chunk.

  The first is exp(g_{s+1} + ... + g_t) at [t, s] for s <= t. The second is
  exp(g_0 + ... + g_t) at t. Both are 0 if a segment begins in between.

  Args:
    g: logarithms of the decays, at most 0.
    fresh: True at tokens that begin a segment.
  """
  tokens = fresh.shape[1]
  segment = jnp.cumsum(fresh, axis=1)
  sees = segment[:, :, None] == segment[:, None, :]
  sees &= jnp.tril(jnp.ones((tokens, tokens), bool))
  # Every pair has a sum of its own. Differences of sums that begin with the chunk would
  # lose digits: a decay of exp(-10) per token is common.
  later = jnp.tril(jnp.ones((tokens, tokens), bool), -1)
  gap = jnp.cumsum(jnp.where(later, g[..., None], 0.0), axis=-2)
  between = jnp.exp(jnp.where(sees[:, None, None], gap, -jnp.inf))
  begun = (segment == 0)[:, None, None]
  return between, jnp.where(begun, jnp.exp(jnp.cumsum(g, axis=-1)), 0.0)


def _fresh(g, starts):
  return jnp.zeros(g.shape[:2], bool) if starts is None else jnp.asarray(starts)
