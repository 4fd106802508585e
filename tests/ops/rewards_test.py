import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix.ops.rewards import overlong_penalty


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
