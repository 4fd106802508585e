"""Average pooling to a given shape."""

from __future__ import annotations

import enum
import math

import jax
import jax.numpy as jnp


class PaddingMode(enum.Enum):
  """How windows meet the edges: VALID stays inside, SAME pads with zeros."""

  VALID = "VALID"
  SAME = "SAME"


def avg_pool_array_to_target_shape(
  input_array: jax.Array,
  target_shape: tuple[int, ...],
  padding_mode: PaddingMode = PaddingMode.VALID,
  count_include_pad_for_same_padding: bool = False,
) -> jax.Array:
  """Means over windows, as many along every dimension as the target has.

  VALID: windows start every n // m elements and are as long as covers all n of them.
  SAME: windows of ceil(n / m) elements side by side, padded with zeros at both ends.

  Args:
    input_array: any shape.
    target_shape: as many dimensions, none larger.
    padding_mode: see above.
    count_include_pad_for_same_padding: divide by the whole window, zeros
      and all.

  Raises:
    ValueError: another number of dimensions, a dimension that is larger than the
      input's, or one that SAME windows cannot give.
  """
  shape = input_array.shape
  if len(shape) != len(target_shape):
    raise ValueError(
      f"an array of shape {shape} cannot be pooled to {target_shape}: give as many "
      "dimensions"
    )
  if any(m > n or m < 1 for n, m in zip(shape, target_shape)):
    raise ValueError(
      f"an array of shape {shape} cannot be pooled to {target_shape}: no dimension may "
      "grow; a projection can do that (FeatureProjectionStrategy)"
    )
  valid = padding_mode is PaddingMode.VALID
  if valid:
    strides = tuple(n // m for n, m in zip(shape, target_shape))
    windows = tuple(n - (m - 1) * s for n, m, s in zip(shape, target_shape, strides))
  else:
    strides = windows = tuple(-(-n // m) for n, m in zip(shape, target_shape))
    made = tuple(-(-n // s) for n, s in zip(shape, strides))
    if made != tuple(target_shape):
      raise ValueError(
        f"SAME windows make {made} of {shape}, not {target_shape}: use VALID, or sizes "
        "that divide"
      )

  def sums(x):
    return jax.lax.reduce_window(
      x, jnp.zeros((), x.dtype), jax.lax.add, windows, strides, padding_mode.value
    )

  counts = math.prod(windows)
  if not valid and not count_include_pad_for_same_padding:
    counts = sums(jnp.ones_like(input_array))
  return sums(input_array) / counts
