"""Sums and log-probabilities whose bits for a row do not depend on other rows, on CPUs.

XLA's CPU backend adds in an order that depends on the number of rows, and on what it
computes in the same loop. The products here have one order, because their sizes leave
no rest that the backend would multiply by another kernel. This was measured, with jax
0.10 and 0.12 on a CPU with AVX-512, and for AVX2 as docs/guides/scoring.md says. XLA
does not promise it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Numbers of a vector register with 512 bits. Smaller registers divide it.
LANES = 16
# With fewer rows, XLA multiplies float32 with a matrix [in, out] in another order.
MANY = 64
# With a multiple of these outputs, few rows and many are multiplied in one order.
_COLUMNS = 64
# Longer sums are sums of parts of this size.
_PART = 4096


def total(x: Float[Array, "*B N"]) -> Float[Array, "*B"]:
  """Returns the sum over the last axis, in float32."""
  x, size = x.astype(jnp.float32), x.shape[-1]
  if size > _PART:
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -size % _PART)])
    return total(total(x.reshape(*x.shape[:-1], -1, _PART)))
  # The barrier keeps XLA from making an ordinary sum of it. A product with one row or
  # one column has another order.
  ones = jax.lax.optimization_barrier(jnp.ones((LANES, size), jnp.float32))
  rows = x[..., None, :] if x.ndim == 1 else x
  count = rows.shape[-2]
  # A mesh may leave one row to a device.
  if rows.size == size or jax.sharding.get_abstract_mesh().size > 1:
    rows = jnp.concatenate([rows, rows], axis=-2)
  sums = jnp.einsum("...i,oi->...o", rows, ones)[..., :count, 0]
  return sums.reshape(x.shape[:-1])


def widened(matrix: Float[Array, "*B I O"]) -> Float[Array, "*B I P"]:
  """Returns a matrix with zeros behind its columns, for a product with any rows."""
  return jnp.pad(
    matrix, [(0, 0)] * (matrix.ndim - 1) + [(0, -matrix.shape[-1] % _COLUMNS)]
  )


@jax.custom_jvp
def rounded(x: Float[Array, "*B"]) -> Float[Array, "*B"]:
  """Returns x as its dtype holds it, whatever the compiler joins it with.

  Where a loop computes x * y + z, the compiler rounds once. Where it converts bfloat16
  to float32, it may leave out the rounding to bfloat16 before.
  """
  if x.dtype == jnp.bfloat16:
    return jax.lax.reduce_precision(x.astype(jnp.float32), 8, 7).astype(x.dtype)
  return jnp.where(x != 0, x, 0)


rounded.defjvp(lambda primals, tangents: (rounded(*primals), tangents[0]))


def kept(x: Float[Array, "*B"], is_invariant: bool) -> Float[Array, "*B"]:
  """Returns `rounded(x)` in an invariant model, and x in others."""
  return rounded(x) if is_invariant else x


def product(x: Float[Array, "*B"], y: float | Float[Array, "*B"]) -> Float[Array, "*B"]:
  """Returns x * y, rounded by itself."""
  return rounded(x * y)


def tempered(
  logits: Float[Array, "*B V"], temperature: float | Float[Array, "*B"]
) -> Float[Array, "*B V"]:
  """Returns logits / temperature, with the same bits for a number and for an array."""
  factor = 1 / jnp.asarray(temperature, jnp.float32)
  # Without the barrier, XLA could divide by a number.
  return product(logits, jax.lax.optimization_barrier(factor)[..., None])


def token_logps(
  logits: Float[Array, "*B V"], tokens: Int[Array, "*B"]
) -> Float[Array, "*B"]:
  """Returns log softmax(logits)[token] in nats, float32; see `vocabulary.softmax`."""
  logits = logits.astype(jnp.float32)
  centred = logits - jnp.max(logits, axis=-1, keepdims=True)
  chosen = jnp.take_along_axis(centred, tokens[..., None], axis=-1)[..., 0]
  is_target = jnp.arange(logits.shape[-1]) == tokens[..., None]
  rest = total(jnp.where(is_target, 0.0, jnp.exp(centred)))
  return chosen - jnp.log(rest + jnp.exp(chosen))
