import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix.ops.reductions import (
  AGGREGATIONS,
  WeightedSum,
  aggregate,
  keep,
  safe_divide,
  safe_exp,
  weighted_sum,
)


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
  gradient = jax.jit(jax.grad(lambda v: weighted_sum(v, weights).total))(values)
  np.testing.assert_array_equal(gradient, [2.0, 0.0, 0.0])


def test_sums_are_float32():
  values = jnp.full((1000,), 1.001, jnp.bfloat16)
  got = weighted_sum(values, jnp.ones((1000,), jnp.bfloat16))
  assert got.total.dtype == got.weight.dtype == jnp.float32
  np.testing.assert_allclose(got.total, 1000 * float(values[0]), rtol=1e-6)


def test_nothing_has_weight():
  assert float(weighted_sum(jnp.ones(3), jnp.zeros(3)).mean()) == 0.0
  gradient = jax.jit(jax.grad(lambda x: safe_divide(x, jnp.zeros(()))))(2.0)
  assert float(gradient) == 0.0
  assert float(safe_divide(jnp.array(3.0), jnp.array(2.0))) == 1.5


VALUES = jnp.array([[1.0, 2.0, 3.0], [8.0, jnp.nan, jnp.nan], [jnp.inf] * 3])
MASK = jnp.array([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
# Sums 6 and 8 over 3 and 1 tokens; the last row is no sequence.
BY_HAND = {
  "token-mean": (14.0, 4.0),
  "sequence-mean-token-mean": (10.0, 2.0),
  "sequence-mean-token-sum": (14.0, 2.0),
  "sequence-mean-token-scale": (3.5, 2.0),
}


def scaled(mode):
  return {"max_tokens": 4} if mode == "sequence-mean-token-scale" else {}


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32, bool])
def test_aggregate_by_hand(mode, dtype):
  got = aggregate(VALUES, MASK.astype(dtype), mode, **scaled(mode))
  assert (float(got.total), float(got.weight)) == BY_HAND[mode]
  assert got.total.dtype == got.weight.dtype == jnp.float32


def test_the_mean_over_tokens_is_the_default():
  assert float(aggregate(VALUES, MASK).mean()) == 3.5


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_aggregate_of_parts_adds_up(mode):
  values = jnp.array(np.random.default_rng(0).normal(size=(5, 4)), jnp.float32)
  mask = (jnp.arange(4) < jnp.array([4, 1, 0, 2, 3])[:, None]).astype(jnp.int32)
  whole = aggregate(values, mask, mode, **scaled(mode)).mean()
  parts = [
    aggregate(values[rows], mask[rows], mode, **scaled(mode))
    for rows in (slice(0, 1), slice(1, 3), slice(3, 5))
  ]
  added = jax.tree.map(lambda *x: sum(x), *parts)
  np.testing.assert_allclose(added.mean(), whole, rtol=1e-6)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_gradient_of_aggregate(mode):
  def loss(values):
    return aggregate(values, MASK, mode, **scaled(mode)).mean()

  gradient = jax.jit(jax.grad(loss))(VALUES)
  np.testing.assert_allclose(jax.jit(jax.grad(loss))(VALUES), gradient, rtol=1e-6)
  for place in [(0, 1), (1, 0), (1, 1), (2, 0)]:
    clean = jnp.where(MASK != 0, VALUES, 0.0)
    slope = (loss(clean.at[place].add(0.5)) - loss(clean.at[place].add(-0.5))).item()
    np.testing.assert_allclose(gradient[place], slope, rtol=1e-5)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_aggregate_of_nothing(mode):
  def loss(values, mask):
    return aggregate(values, mask, mode, **scaled(mode)).mean()

  for values, mask in ((VALUES, 0 * MASK), (VALUES[:0], MASK[:0])):
    assert float(loss(values, mask)) == 0.0
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(values, mask), 0 * mask)


def test_aggregate_refuses_what_it_does_not_know():
  with pytest.raises(ValueError, match=r"unknown aggregation 'mean'.*token-mean"):
    aggregate(VALUES, MASK, "mean")
  for mode, tokens in (("token-mean", 4), ("sequence-mean-token-scale", None)):
    with pytest.raises(ValueError, match=f"max_tokens={tokens} with aggregation"):
      aggregate(VALUES, MASK, mode, max_tokens=tokens)
  with pytest.raises(ValueError, match="positive max_tokens"):
    aggregate(VALUES, MASK, "sequence-mean-token-scale", max_tokens=0)


def test_safe_exp_is_finite():
  x = jnp.array([-1e4, 0.0, math.log(3.0), 1e4])
  want = [math.exp(-20), 1, 3, math.exp(20)]
  np.testing.assert_allclose(safe_exp(x), want, rtol=1e-5)
  gradient = jax.jit(jax.grad(lambda x: safe_exp(x).sum()))(x)
  np.testing.assert_allclose(gradient, [0, 1, 3, 0], rtol=1e-5)


def test_kept_values_shield_what_comes_after():
  x, mask = jnp.array([4.0, -1.0, jnp.nan]), jnp.array([1, 0, 0])
  loss = lambda x: jnp.sum(keep(jnp.sqrt(1 + keep(x, mask)), mask))
  value, gradient = jax.jit(jax.value_and_grad(loss))(x)
  np.testing.assert_allclose(value, math.sqrt(5), rtol=1e-6)
  np.testing.assert_allclose(gradient, [0.5 / math.sqrt(5), 0, 0], rtol=1e-6)
  assert keep(x.astype(jnp.bfloat16), mask).dtype == jnp.float32
