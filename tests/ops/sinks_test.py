import jax
import jax.numpy as jnp
import numpy as np

from tunix.ops import sinks


def test_weights_by_hand():
  # exp: 1, 2, 3 and a sink of 4: the weights are tenths, and sum to 0.6.
  got = sinks.softmax(jnp.log(jnp.array([1.0, 2.0, 3.0])), jnp.log(jnp.array(4.0)))
  np.testing.assert_allclose(got, [0.1, 0.2, 0.3], rtol=1e-6)


def test_extreme_logits_are_finite():
  scores = jnp.array([[100.0, 0.0], [-1e30, -1e30], [3.0, 3.0]])
  got = sinks.softmax(scores, jnp.array([0.0, 1.0, 1000.0]))
  np.testing.assert_allclose(got, [[1, 0], [0, 0], [0, 0]], atol=1e-6)


def test_gradient_against_differences():
  scores = np.random.default_rng(0).normal(size=4)
  loss = lambda sink: jnp.sum(sinks.softmax(jnp.asarray(scores), sink) ** 2)
  step = 1e-2
  want = (loss(jnp.float32(0.3 + step)) - loss(jnp.float32(0.3 - step))) / (2 * step)
  np.testing.assert_allclose(jax.jit(jax.grad(loss))(jnp.float32(0.3)), want, rtol=1e-3)


def test_without_sinks_it_is_the_softmax():
  scores = jnp.array([[1.0, 2.0, 0.5]])
  np.testing.assert_array_equal(sinks.softmax(scores, None), jax.nn.softmax(scores))
