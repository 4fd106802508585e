import jax
import jax.numpy as jnp
import numpy as np

from tunix.ops.reductions import WeightedSum, safe_divide, weighted_sum


def test_weighted_sum_by_hand():
  # 1 * 0.5 + 3 * 1.5 = 5 over a weight of 2.
  got = weighted_sum(jnp.array([[1.0, 2.0, 3.0]]), jnp.array([[0.5, 0.0, 1.5]]))
  assert (float(got.total), float(got.weight)) == (5.0, 2.0)
  assert float(got.mean()) == 2.5


def test_parts_add_up_to_the_whole():
  values, weights = jnp.arange(12.0).reshape(4, 3), jnp.arange(12).reshape(4, 3) % 4
  whole = weighted_sum(values, weights)
  parts = [weighted_sum(values[i : i + 2], weights[i : i + 2]) for i in (0, 2)]
  added = WeightedSum(*(a + b for a, b in zip(*parts)))
  assert float(added.mean()) == float(whole.mean())
  # A mean of the parts' means would be something else.
  assert float((parts[0].mean() + parts[1].mean()) / 2) != float(whole.mean())


def test_values_without_weight_may_be_anything():
  values, weights = jnp.array([1.0, jnp.inf, jnp.nan]), jnp.array([2, 0, 0])
  assert float(weighted_sum(values, weights).total) == 2.0
  gradient = jax.grad(lambda v: weighted_sum(v, weights).total)(values)
  np.testing.assert_array_equal(gradient, [2.0, 0.0, 0.0])


def test_sums_are_float32():
  values = jnp.full((1000,), 1.001, jnp.bfloat16)
  got = weighted_sum(values, jnp.ones((1000,), jnp.bfloat16))
  assert got.total.dtype == got.weight.dtype == jnp.float32
  np.testing.assert_allclose(got.total, 1000 * float(values[0]), rtol=1e-6)


def test_nothing_has_weight():
  assert float(weighted_sum(jnp.ones(3), jnp.zeros(3)).mean()) == 0.0
  gradient = jax.grad(lambda x: safe_divide(x, jnp.zeros(())))(2.0)
  assert float(gradient) == 0.0
  assert float(safe_divide(jnp.array(3.0), jnp.array(2.0))) == 1.5
