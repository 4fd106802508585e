import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix.ops.reductions import aggregate
from tunix.ops.rewards import drop_truncated, overlong_penalty


def test_overlong_penalty_by_hand():
  # No penalty up to 100 - 20 = 80 tokens, half of it at 90, all of it from 100 on.
  lengths = jnp.array([0, 80, 81, 90, 100, 130])
  got = overlong_penalty(lengths, 100, 20, 0.5)
  np.testing.assert_allclose(got, [0, 0, -0.025, -0.25, -0.5, -0.5], rtol=1e-6)
  np.testing.assert_allclose(overlong_penalty(lengths, 100, 20), 2 * got, rtol=1e-6)
  jitted = jax.jit(lambda n: overlong_penalty(n, 100, 20, 0.5))(lengths)
  np.testing.assert_allclose(jitted, got, rtol=1e-6)


def test_a_buffer_of_everything():
  got = overlong_penalty(jnp.array([0, 2, 4]), 4, 4)
  np.testing.assert_allclose(got, [0, -0.5, -1], rtol=1e-6)


@pytest.mark.parametrize("buffer_tokens", [0, 101])
def test_a_buffer_that_does_not_fit(buffer_tokens):
  with pytest.raises(ValueError, match="between 1 and max_tokens=100"):
    overlong_penalty(jnp.array([1]), 100, buffer_tokens)


def test_a_penalty_is_not_negative():
  with pytest.raises(ValueError, match=r"penalty=-1\.0 must not be negative"):
    overlong_penalty(jnp.array([1]), 100, 20, -1.0)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32, bool])
def test_drop_truncated(dtype):
  mask = jnp.array([[1, 1], [1, 0], [1, 1]], dtype)
  got = drop_truncated(mask, jnp.array([False, False, True]))
  assert got.dtype == mask.dtype
  np.testing.assert_array_equal(got, [[1, 1], [1, 0], [0, 0]])


def test_dropping_rows_equals_a_smaller_batch():
  values, mask = jnp.arange(6.0).reshape(3, 2), jnp.array([[1, 1], [1, 0], [1, 1]])
  for mode in ("token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum"):
    dropped = drop_truncated(mask, jnp.array([False, True, False]))
    got = aggregate(values, dropped, mode)
    want = aggregate(values[::2], mask[::2], mode)
    assert float(got.mean()) == float(want.mean())
