"""The state space layer of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060, section 6).

A head has a state S [P, N] that begins as zeros. Token t has a step dt > 0, a value x
[P] and two vectors b, c [N]; the head has a decay rate a < 0:

  S_t = exp(dt_t a) S_{t-1} + dt_t x_t b_t^T
  y_t = S_t c_t

`recurrent` computes this token by token. `chunked` computes the same in chunks of Q
tokens: inside a chunk as a masked product of matrices, between chunks by the state. Its
work and its memory grow with T, and the products suit matrix units.

A token with dt = 0 leaves the state as it is, which is how padding is passed. A token
that begins a segment (`starts`) sees no state of earlier tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Values = Float[Array, "B T H P"]
Steps = Float[Array, "B T H"]
Vectors = Float[Array, "B T G N"]
State = Float[Array, "B H P N"]


def recurrent(
  x: Values,
  dt: Steps,
  a: Float[Array, " H"],
  b: Vectors,
  c: Vectors,
  *,
  state: State | None = None,
  starts: Bool[Array, "B T"] | None = None,
) -> tuple[Values, State]:
  """Returns y and the state after the last token, in float32, token by token.

  Args:
    x: values of H heads.
    dt: steps, at least 0; 0 on padding.
    a: decay rate of each head, below 0.
    b, c: vectors of G groups; the H / G heads of a group share them.
    state: state before the first token; None for zeros.
    starts: True at tokens that begin a segment; None for none.
  """
  heads = x.shape[2]
  x, dt, b, c = (v.astype(jnp.float32) for v in (x, dt, b, c))
  first = _state(x, b) if state is None else state.astype(jnp.float32)
  fresh = jnp.zeros(x.shape[:2], bool) if starts is None else starts

  def token(state, inputs):
    x, dt, b, c, fresh = inputs
    b, c = (jnp.repeat(v, heads // v.shape[1], axis=1) for v in (b, c))
    keep = jnp.where(fresh[:, None], 0.0, jnp.exp(dt * a))
    state = keep[..., None, None] * state
    state = state + jnp.einsum("bh,bhp,bhn->bhpn", dt, x, b)
    return state, jnp.einsum("bhpn,bhn->bhp", state, c)

  by_token = [jnp.moveaxis(v, 1, 0) for v in (x, dt, b, c, fresh)]
  last, y = jax.lax.scan(token, first, tuple(by_token))
  return jnp.moveaxis(y, 0, 1), last


def chunked(
  x: Values,
  dt: Steps,
  a: Float[Array, " H"],
  b: Vectors,
  c: Vectors,
  *,
  state: State | None = None,
  starts: Bool[Array, "B T"] | None = None,
  chunk: int = 64,
) -> tuple[Values, State]:
  """Returns what `recurrent` returns, computed in chunks.

  The backward pass keeps the state before each chunk and computes the rest of a chunk
  again.

  Args:
    x, dt, a, b, c, state, starts: see `recurrent`.
    chunk: number Q of tokens of a chunk.
  """
  length = x.shape[1]
  x, dt, b, c = (v.astype(jnp.float32) for v in (x, dt, b, c))
  first = _state(x, b) if state is None else state.astype(jnp.float32)
  fresh = jnp.zeros(x.shape[:2], bool) if starts is None else starts
  chunk = min(chunk, length)
  padding = -length % chunk  # tokens with dt = 0

  def cut(v):
    v = jnp.pad(v, [(0, 0), (0, padding)] + [(0, 0)] * (v.ndim - 2))
    return jnp.moveaxis(v.reshape(v.shape[0], -1, chunk, *v.shape[2:]), 1, 0)

  step = jax.checkpoint(lambda state, inputs: _chunk(state, a, *inputs))
  last, y = jax.lax.scan(step, first, tuple(map(cut, (x, dt, b, c, fresh))))
  y = jnp.moveaxis(y, 0, 1).reshape(x.shape[0], -1, *x.shape[2:])
  return y[:, :length], last


def _chunk(state, a, x, dt, b, c, fresh):
  """Runs a chunk: (state after it, y)."""
  batch, tokens, groups = b.shape[:3]
  by_group = lambda v: v.reshape(batch, tokens, groups, -1, *v.shape[3:])
  x, dt = by_group(x), by_group(dt)  # [B, Q, G, H / G, ...]
  state = state.reshape(batch, groups, -1, *state.shape[2:])
  # total[t]: logarithm of the decay from before the chunk to token t.
  total = jnp.cumsum(dt * a.reshape(groups, -1), axis=1)
  segment = jnp.cumsum(fresh, axis=1)
  # Token t sees token s <= t if no segment begins after s, up to t.
  sees = segment[:, :, None] == segment[:, None, :]
  sees &= jnp.tril(jnp.ones((tokens, tokens), bool))
  gap = total[:, :, None] - total[:, None, :]  # [B, t, s, G, H / G], at most 0
  decay = jnp.exp(jnp.where(sees[..., None, None], gap, -jnp.inf))
  scores = jnp.einsum("btgn,bsgn->btsg", c, b)
  inputs = dt[..., None] * x
  y = jnp.einsum("btsg,btsgk,bsgkp->btgkp", scores, decay, inputs)
  old = jnp.where((segment == 0)[..., None, None], jnp.exp(total), 0.0)
  y = y + jnp.einsum("btgn,btgk,bgkpn->btgkp", c, old, state)
  state = old[:, -1, :, :, None, None] * state
  state = state + jnp.einsum("bsgk,bsgkp,bsgn->bgkpn", decay[:, -1], inputs, b)
  flat = lambda v, at: v.reshape(*v.shape[:at], -1, *v.shape[at + 2 :])
  return flat(state, 1), flat(y, 2)


def _state(x: Values, b: Vectors) -> State:
  return jnp.zeros((x.shape[0], *x.shape[2:], b.shape[-1]), jnp.float32)
