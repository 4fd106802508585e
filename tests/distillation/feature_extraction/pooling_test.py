"""Average pooling by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from tunix.distillation.feature_extraction import (
  PaddingMode,
  avg_pool_array_to_target_shape,
)


def test_valid_by_hand():
  # 5 to 2: windows start every 2, and cover 5 - 2 = 3 numbers.
  got = avg_pool_array_to_target_shape(jnp.arange(5.0), (2,))
  np.testing.assert_allclose(got, [1.0, 3.0])


def test_same_by_hand():
  # 5 to 3: windows of 2, one zero at the end.
  x = jnp.arange(1.0, 6.0)
  got = avg_pool_array_to_target_shape(x, (3,), PaddingMode.SAME)
  np.testing.assert_allclose(got, [1.5, 3.5, 5.0])
  got = avg_pool_array_to_target_shape(x, (3,), PaddingMode.SAME, True)
  np.testing.assert_allclose(got, [1.5, 3.5, 2.5])


def test_every_dimension():
  x = jnp.arange(24.0).reshape(2, 3, 4)
  got = avg_pool_array_to_target_shape(x, (2, 1, 2))
  np.testing.assert_allclose(got[:, 0], x.reshape(2, 3, 2, 2).mean((1, 3)))
  assert avg_pool_array_to_target_shape(x, x.shape).tolist() == x.tolist()


@pytest.mark.parametrize(
  ("target", "mode", "says"),
  [
    ((2,), PaddingMode.VALID, "number of dimensions"),
    ((2, 5), PaddingMode.VALID, "may grow"),
    ((2, 3), PaddingMode.SAME, "SAME windows"),
  ],
)
def test_shapes_that_cannot_be(target, mode, says):
  with pytest.raises(ValueError, match=says):
    avg_pool_array_to_target_shape(jnp.zeros((2, 4)), target, mode)
