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

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from tunix.ops.recurrences import linear_recurrence

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
  arrays = _arrays(x, dt, a, b, c, state)
  return linear_recurrence.by_tokens(_token, *arrays, starts)


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
  arrays = _arrays(x, dt, a, b, c, state)
  return linear_recurrence.by_chunks(_chunk, *arrays, starts, chunk=chunk)


def _token(state, vectors, values):
  """Runs a token, see `linear_recurrence.TokenRule`."""
  (b, c), (inputs,) = vectors, values
  state = state + jnp.einsum("bhp,bhn->bhpn", inputs, b)
  return state, jnp.einsum("bhpn,bhn->bhp", state, c)


def _chunk(state, decay, old, vectors, values):
  """Runs a chunk, see `linear_recurrence.ChunkRule`."""
  (b, c), (inputs,) = vectors, values
  scores = jnp.einsum("bgtn,bgsn->bgts", c, b)[:, :, None]
  y = jnp.einsum("bgrts,bgrsp->bgrtp", decay * scores, inputs)
  y = y + old[..., None] * jnp.einsum("bgtn,bgrpn->bgrtp", c, state)
  state = old[..., -1, None, None] * state
  inputs = decay[..., -1, :, None] * inputs
  return state + jnp.einsum("bgrsp,bgsn->bgrpn", inputs, b), y


def _arrays(x, dt, a, b, c, state):
  """Returns (state, logarithms of decays, vectors, values) in float32."""
  x, dt, b, c = (v.astype(jnp.float32) for v in (x, dt, b, c))
  if state is None:
    state = jnp.zeros((x.shape[0], *x.shape[2:], b.shape[-1]), jnp.float32)
  return state.astype(jnp.float32), dt * a, (b, c), (dt[..., None] * x,)
