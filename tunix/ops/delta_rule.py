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
  q, k, v, g, beta, fresh, first = _float32(q, k, v, g, beta, state, starts)
  heads = v.shape[2]

  def token(state, inputs):
    q, k, v, g, beta, fresh = inputs
    q, k = (jnp.repeat(x, heads // x.shape[1], axis=1) for x in (q, k))
    keep = jnp.where(fresh[:, None], 0.0, jnp.exp(g))
    state = keep[..., None, None] * state
    known = _einsum("bhk,bhkv->bhv", k, state)
    state = state + _einsum("bhk,bhv->bhkv", k, beta[..., None] * (v - known))
    return state, _einsum("bhk,bhkv->bhv", q, state)

  by_token = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta, fresh)]
  last, y = jax.lax.scan(token, first, tuple(by_token))
  return jnp.moveaxis(y, 0, 1), last


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
  q, k, v, g, beta, fresh, first = _float32(q, k, v, g, beta, state, starts)
  (rows, length, groups), heads = k.shape[:3], v.shape[2]
  chunk = min(chunk, 1 << (length - 1).bit_length())
  padding = -length % chunk  # tokens with beta = 0 and g = 0

  def cut(x):
    """Returns the chunks, [T / C, B, ..., C] or [T / C, B, ..., C, K]."""
    x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
    x = jnp.moveaxis(x.reshape(rows, -1, chunk, *x.shape[2:]), 1, 0)
    return x if x.ndim == 3 else jnp.moveaxis(x, 2, 3)

  grouped = lambda x: x.reshape(*x.shape[:2], groups, heads // groups, *x.shape[3:])
  each = lambda x: jnp.moveaxis(cut(grouped(x)), 3, 4)  # [T / C, B, G, H / G, C, ...]
  inputs = (cut(q), cut(k), each(v), each(g), each(beta), cut(fresh))
  first = first.reshape(rows, groups, -1, *first.shape[2:])
  last, y = jax.lax.scan(jax.checkpoint(_chunk), first, inputs)
  # [T / C, B, G, H / G, C, V] to [B, T, H, V]
  y = jnp.moveaxis(y, (0, 4), (1, 2)).reshape(rows, -1, heads, y.shape[-1])
  return y[:, :length], last.reshape(rows, heads, *last.shape[3:])


def _chunk(state, inputs):
  """Runs a chunk: (state after it, y).

  Shapes: q, k [B, G, C, K]; v [B, G, R, C, V]; g, beta [B, G, R, C]; fresh [B, C];
  state [B, G, R, K, V].
  """
  q, k, v, g, beta, fresh = inputs
  tokens = fresh.shape[1]
  segment = jnp.cumsum(fresh, axis=1)
  # Token t sees token s <= t if no segment begins after s, up to t.
  sees = segment[:, :, None] == segment[:, None, :]
  sees &= jnp.tril(jnp.ones((tokens, tokens), bool))
  # gap[t, s] = g_{s+1} + ... + g_t. Differences of sums that begin with the chunk would
  # lose digits: a decay of exp(-10) per token is common.
  later = jnp.tril(jnp.ones((tokens, tokens), bool), -1)
  gap = jnp.cumsum(jnp.where(later, g[..., None], 0.0), axis=-2)
  decay = jnp.exp(jnp.where(sees[:, None, None], gap, -jnp.inf))  # [B, G, R, C, C]
  begun = (segment == 0)[:, None, None]
  # Decay of the state before the chunk.
  old = jnp.where(begun, jnp.exp(jnp.cumsum(g, axis=-1)), 0.0)

  keys = _einsum("bgtk,bgsk->bgts", k, k)[:, :, None]
  solve = _inverse(jnp.tril(beta[..., None] * decay * keys, -1))
  known = old[..., None] * _einsum("bgtk,bgrkv->bgrtv", k, state)
  u = _einsum("bgrts,bgrsv->bgrtv", solve, beta[..., None] * (v - known))

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


def _float32(q, k, v, g, beta, state, starts):
  """Returns the arguments as float32, `starts` as an array, and the first state."""
  q, k, v, g, beta = (x.astype(jnp.float32) for x in (q, k, v, g, beta))
  fresh = jnp.zeros(g.shape[:2], bool) if starts is None else starts
  if state is None:
    state = jnp.zeros((v.shape[0], v.shape[2], k.shape[3], v.shape[3]), jnp.float32)
  return q, k, v, g, beta, jnp.asarray(fresh), state.astype(jnp.float32)
