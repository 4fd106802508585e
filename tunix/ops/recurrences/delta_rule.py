"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464), by tokens and by chunks.

A head has a state S [K, V] that begins as zeros. Token t has a query q and a key k [K],
a value v [V], a rate beta in [0, 1] and a logarithm of decay g <= 0:

  S'  = exp(g_t) S_{t-1}
  S_t = S' + beta_t k_t (v_t - S'^T k_t)^T
  y_t = S_t^T q_t

`recurrent` computes this token by token. `chunked` computes the same in chunks of C
tokens. Inside a chunk the corrections u_t = beta_t (v_t - S'^T k_t) solve a triangular
system, the WY form of Yang et al. 2024 (arXiv:2406.06484, section 3):

  (I + A) u = beta v - beta decay k S,  A[t, s] = beta_t decay(s to t) k_t^T k_s, s < t

The work and the memory of both grow linearly with T. The chunks are products of
matrices.

A token with beta = 0 and g = 0 leaves the state as it is; padding is passed this way. A
token that begins a segment (`starts`) sees no state of earlier tokens.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from tunix.ops.recurrences import linear_recurrence

Vectors = Float[Array, "B T G K"]
Values = Float[Array, "B T H V"]
Rates = Float[Array, "B T H"]
State = Float[Array, "B H K V"]

# The triangular system amplifies errors, so no factor is rounded to 16 bits.
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def recurrent(
  q: Vectors,
  k: Vectors,
  v: Values,
  g: Rates,
  beta: Rates,
  *,
  state: State | None = None,
  starts: Bool[Array, "B T"] | None = None,
) -> tuple[Values, State]:
  """Returns y and the state after the last token, in float32, token by token.

  Args:
    q, k: queries and keys of G groups; the H / G heads of a group share them.
    v: values of H heads.
    g: logarithms of the decay, at most 0; 0 on padding.
    beta: rates of correction; 0 on padding.
    state: state before the first token; None for zeros.
    starts: True at tokens that begin a segment; None for none.
  """
  arrays = _arrays(q, k, v, g, beta, state)
  return linear_recurrence.by_tokens(_token, *arrays, starts)


def chunked(
  q: Vectors,
  k: Vectors,
  v: Values,
  g: Rates,
  beta: Rates,
  *,
  state: State | None = None,
  starts: Bool[Array, "B T"] | None = None,
  chunk: int = 64,
) -> tuple[Values, State]:
  """Returns what `recurrent` returns, computed in chunks.

  The backward pass keeps the state before each chunk and computes the rest of a chunk
  again.

  Args:
    q, k, v, g, beta, state, starts: see `recurrent`.
    chunk: number C of tokens of a chunk, a power of 2.

  Raises:
    ValueError: `chunk` is no power of 2.
  """
  if chunk < 1 or chunk & (chunk - 1):
    raise ValueError(f"chunk is {chunk}; expected a power of 2, such as 64")
  arrays = _arrays(q, k, v, g, beta, state)
  return linear_recurrence.by_chunks(_chunk, *arrays, starts, chunk=chunk)


def _token(state, vectors, values):
  """Runs a token, see `linear_recurrence.TokenRule`."""
  (q, k), (v, beta) = vectors, values
  prediction = _einsum("bhk,bhkv->bhv", k, state)
  state = state + _einsum("bhk,bhv->bhkv", k, beta[..., None] * (v - prediction))
  return state, _einsum("bhk,bhkv->bhv", q, state)


def _chunk(state, decay, old, vectors, values):
  """Runs a chunk, see `linear_recurrence.ChunkRule`."""
  (q, k), (v, beta) = vectors, values
  keys = _einsum("bgtk,bgsk->bgts", k, k)[:, :, None]
  solve = _inverse(jnp.tril(beta[..., None] * decay * keys, -1))
  prediction = old[..., None] * _einsum("bgtk,bgrkv->bgrtv", k, state)
  u = _einsum("bgrts,bgrsv->bgrtv", solve, beta[..., None] * (v - prediction))

  scores = _einsum("bgtk,bgsk->bgts", q, k)[:, :, None]
  y = _einsum("bgrts,bgrsv->bgrtv", decay * scores, u)
  y = y + old[..., None] * _einsum("bgtk,bgrkv->bgrtv", q, state)
  state = old[..., -1, None, None] * state
  u = decay[..., -1, :, None] * u
  return state + _einsum("bgsk,bgrsv->bgrkv", k, u), y


@jax.custom_jvp
def _inverse(a: Float[Array, "... C C"]) -> Float[Array, "... C C"]:
  """Returns the inverse of I + a, for a strictly lower triangular a; C = 2^n.

  The inverses of the diagonal blocks of size b give those of size 2 b:
  [[X, 0], [-Z L X, Z]] is the inverse of [[X^-1, 0], [L, Z^-1]].
  """
  size = a.shape[-1]
  block = jnp.ones((*a.shape[:-1], 1, 1), a.dtype)  # [..., C / b, b, b]
  b = 1
  while b < size:
    pairs = a.reshape(*a.shape[:-2], size // (2 * b), 2 * b, size // (2 * b), 2 * b)
    own = jnp.diagonal(pairs, axis1=-4, axis2=-2)  # [..., 2 b, 2 b, C / 2 b]
    low = jnp.moveaxis(own[..., b:, :b, :], -1, -3)
    x, z = block[..., ::2, :, :], block[..., 1::2, :, :]
    corner = -_einsum("...ij,...jk,...kl->...il", z, low, x)
    above = jnp.concatenate([x, jnp.zeros_like(x)], axis=-1)
    block = jnp.concatenate([above, jnp.concatenate([corner, z], axis=-1)], axis=-2)
    b *= 2
  return block[..., 0, :, :]


@_inverse.defjvp
def _inverse_jvp(primals, tangents):
  (a,), (change,) = primals, tangents
  out = _inverse(a)
  return out, -_einsum("...ij,...jk,...kl->...il", out, change, out)


def _arrays(q, k, v, g, beta, state):
  """Returns (state, g, vectors, values) in float32."""
  q, k, v, g, beta = (x.astype(jnp.float32) for x in (q, k, v, g, beta))
  if state is None:
    state = jnp.zeros((v.shape[0], v.shape[2], k.shape[3], v.shape[3]), jnp.float32)
  return state.astype(jnp.float32), g, (q, k), (v, beta)
