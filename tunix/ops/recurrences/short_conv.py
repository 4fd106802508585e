"""The short causal convolution before a recurrence: one filter for each channel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def causal_conv(
  x: Float[Array, "B T C"],
  kernel: Float[Array, "K C"],
  *,
  before: Float[Array, "B W C"] | None = None,
  valid: Bool[Array, "B T"] | None = None,
  starts: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T C"], Float[Array, "B W C"]]:
  """Returns y_t = sum_j kernel[K - 1 - j] x_{t - j} in float32, and the last inputs.

  The sum ends at the beginning of the segment of t. Padding counts as zeros, and is not
  among the last inputs.

  Args:
    x: inputs of C channels.
    kernel: K taps, the tap of the token itself last.
    before: the W = K - 1 valid inputs before the first token; None for zeros.
    valid: False on padding, which is at the beginning or at the end of a row; None for
      no padding.
    starts: True at tokens that begin a segment; None for none.

  Returns:
    y, and the last W valid inputs including `before`.
  """
  taps, (rows, tokens, channels) = kernel.shape[0], x.shape
  x, kernel = x.astype(jnp.float32), kernel.astype(jnp.float32)
  if valid is not None:
    x = jnp.where(valid[..., None], x, 0.0)
  if before is None:
    before = jnp.zeros((rows, taps - 1, channels), jnp.float32)
  joined = jnp.concatenate([before.astype(jnp.float32), x], axis=1)
  segment = None
  if starts is not None:
    segment = jnp.cumsum(starts, axis=1)
    segment = jnp.pad(segment, ((0, 0), (taps - 1, 0)))  # `before` is segment 0
  y = jnp.zeros_like(x)
  for j in range(taps):
    at = slice(taps - 1 - j, taps - 1 - j + tokens)
    shifted = joined[:, at]
    if segment is not None:
      same = segment[:, at] == segment[:, taps - 1 :]
      shifted = jnp.where(same[..., None], shifted, 0.0)
    y = y + kernel[taps - 1 - j] * shifted
  if valid is None:
    return y, joined[:, tokens:]
  # The slot after the last valid token, counted in x; 0 if there is none.
  stop = jnp.max(jnp.where(valid, jnp.arange(1, tokens + 1), 0), axis=1)
  last = jax.vmap(
    lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, taps - 1, axis=0)
  )(joined, stop)
  return y, last
