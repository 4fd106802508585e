"""Average pooling to a given shape."""

from __future__ import annotations

import enum
import math

import jax
import jax.numpy as jnp


class PaddingMode(enum.Enum):
  """The treatment of edges: VALID windows stay inside, SAME pads with zeros."""

  VALID = "VALID"
  SAME = "SAME"


def avg_pool_array_to_target_shape(
  input_array: jax.Array,
  target_shape: tuple[int, ...],
  padding_mode: PaddingMode = PaddingMode.VALID,
  count_include_pad_for_same_padding: bool = False,
) -> jax.Array:
  """Averages an array over windows, to the target's size n -> m in each dimension.

  VALID: windows start every n // m elements and are just long enough to cover all n.
  SAME: adjacent windows of ceil(n / m) elements, with zeros as padding at both ends.

  Args:
    input_array: an array of any shape.
    target_shape: the same number of dimensions, none larger than the input's.
    padding_mode: see above.
    count_include_pad_for_same_padding: if True, a sum is divided by the whole window
      with its padding.

  Raises:
    ValueError: the number of dimensions differs, a dimension is larger than the
      input's, or SAME windows cannot give the target shape.
  """
  shape = input_array.shape
  if len(shape) != len(target_shape):
    raise ValueError(
      f"an array of shape {shape} cannot be pooled to {target_shape}: use the same "
      "number of dimensions"
    )
  if any(m > n or m < 1 for n, m in zip(shape, target_shape)):
    raise ValueError(
      f"an array of shape {shape} cannot be pooled to {target_shape}: no dimension may "
      "grow; use a projection (FeatureProjectionStrategy)"
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
        f"SAME windows pool {shape} to {made}, not to {target_shape}: use VALID, or "
        "sizes that divide"
      )

  def sums(x):
    return jax.lax.reduce_window(
      x, jnp.zeros((), x.dtype), jax.lax.add, windows, strides, padding_mode.value
    )

  counts = math.prod(windows)
  if not valid and not count_include_pad_for_same_padding:
    counts = sums(jnp.ones_like(input_array))
  return sums(input_array) / counts
