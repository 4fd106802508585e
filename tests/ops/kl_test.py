import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix.ops import kl

RNG = np.random.default_rng(0)


def test_estimators_by_hand():
  # p = 1/2, q = 1/4: log r = ln 2, 1/r = 1/2.
  logps, ref = jnp.log(jnp.array([[0.5]])), jnp.log(jnp.array([[0.25]]))
  ln2 = math.log(2.0)
  np.testing.assert_allclose(kl.k1(logps, ref), [[ln2]], rtol=1e-6)
  np.testing.assert_allclose(kl.k2(logps, ref), [[ln2**2 / 2]], rtol=1e-6)
  np.testing.assert_allclose(kl.k3(logps, ref), [[0.5 - 1 + ln2]], rtol=1e-6)


def test_exact_by_hand():
  # p = (1/2, 1/2), q = (1/4, 3/4): 1/2 ln 2 + 1/2 ln 2/3.
  logits, ref = jnp.array([[1.0, 1.0]]), jnp.log(jnp.array([[1.0, 3.0]]))
  want = (math.log(2.0) + math.log(2.0 / 3.0)) / 2
  np.testing.assert_allclose(kl.exact(logits, ref), [want], rtol=1e-6)


def test_exact_of_impossible_words():
  # A word that both forbid, and one that only the policy forbids.
  logits = jnp.array([0.0, 0.0, -jnp.inf, -jnp.inf])
  ref = jnp.array([0.0, 0.0, -jnp.inf, math.log(2.0)])
  np.testing.assert_allclose(kl.exact(logits, ref), math.log(2.0), rtol=1e-6)
  assert kl.exact(ref, logits) == jnp.inf
  assert np.isfinite(jax.jit(jax.grad(kl.exact))(logits, ref)[:2]).all()


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_expectation_is_the_divergence(name):
  logits, ref = jnp.array(RNG.normal(size=(2, 7)))
  p, logps, ref_logps = (
    jax.nn.softmax(logits),
    jax.nn.log_softmax(logits),
    jax.nn.log_softmax(ref),
  )
  got = jnp.sum(p * kl.ESTIMATORS[name](logps, ref_logps))
  np.testing.assert_allclose(got, kl.exact(logits, ref), rtol=1e-5)


def test_k2_is_close_for_close_policies_only():
  logits, ref = RNG.normal(size=(2, 7))

  def error(distance):
    near = jnp.array(logits + distance * ref)
    p, logps = jax.nn.softmax(logits), jax.nn.log_softmax(logits)
    k2 = jnp.sum(p * kl.k2(logps, jax.nn.log_softmax(near)))
    return abs(float(k2 / kl.exact(jnp.array(logits), near)) - 1)

  assert error(0.05) < 0.05 < error(2.0)


def test_never_negative_and_exact_near_zero():
  log_r = jnp.array([[-1e-4, 1e-4, 0.0, 3.0, -3.0]])
  assert (kl.k2(log_r, 0 * log_r) >= 0).all() and (kl.k3(log_r, 0 * log_r) >= 0).all()
  # x^2/2 - x^3/6 for small x; in float32 exp(x) - 1 - x has no digit left here.
  got = kl.k3(log_r, jnp.zeros_like(log_r))[0, :3]
  np.testing.assert_allclose(got, [5e-9, 5e-9, 0.0], rtol=2e-2)


def test_k3_stays_finite():
  far = jnp.array([[-1e3, 1e3]])
  value, gradient = jax.jit(
    jax.value_and_grad(lambda x: kl.k3(x, jnp.zeros((1, 2))).sum())
  )(far)
  assert np.isfinite(value)
  np.testing.assert_array_equal(gradient, [[0.0, 1.0]])


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_gradient_is_the_slope_and_jit_equals_eager(name):
  fn = kl.ESTIMATORS[name]
  logps, ref = jnp.array(RNG.normal(size=(2, 1, 4)))
  h = 1e-2
  slope = (fn(logps + h, ref) - fn(logps - h, ref)) / (2 * h)
  gradient = jax.jit(jax.grad(lambda x: fn(x, ref).sum()))(logps)
  np.testing.assert_allclose(gradient, slope, rtol=1e-3, atol=1e-3)
  np.testing.assert_allclose(jax.jit(fn)(logps, ref), fn(logps, ref), rtol=1e-6)


def test_corrected_by_hand():
  # Ratio 2, k3 of (1/2, 1/4) as above: twice its value. The gradient in logps is that
  # of the ratio, 2 k3, plus twice that of k3, 1 - 1/2.
  logps, ref, old = (jnp.log(jnp.array([[x]])) for x in (0.5, 0.25, 0.25))
  fn = lambda x: kl.corrected(kl.k3(x, ref), x - old).sum()
  value, gradient = jax.jit(jax.value_and_grad(fn))(logps)
  k3 = 0.5 - 1 + math.log(2.0)
  np.testing.assert_allclose(value, 2 * k3, rtol=1e-5)
  np.testing.assert_allclose(gradient, [[2 * k3 + 1]], rtol=1e-5)


def test_names():
  of = kl.ESTIMATORS
  assert (of["kl"], of["mse_kl"], of["low_var_kl"]) == (kl.k1, kl.k2, kl.k3)
  assert (of["k1"], of["k2"], of["k3"]) == (kl.k1, kl.k2, kl.k3)
