import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix.ops import importance

# Ratios 1/2, 3 and (masked) anything; 4 and 1/4.
RATIOS = jnp.array([[0.5, 3.0, jnp.nan], [4.0, 0.25, 1.0]])
MASK = jnp.array([[1, 1, 0], [1, 1, 0]])
ROLLOUT = jnp.array([[-1.0, -2.0, jnp.inf], [-0.5, -3.0, jnp.nan]])
LOGPS = ROLLOUT + jnp.log(RATIOS)


def close(got, want):
  np.testing.assert_allclose(got, want, rtol=1e-5)


def test_truncated_by_hand():
  close(importance.truncated(LOGPS, ROLLOUT, MASK), [[0.5, 2, 0], [2, 0.25, 0]])
  got = importance.truncated(LOGPS, ROLLOUT, MASK, cap=3.5)
  close(got, [[0.5, 3, 0], [3.5, 0.25, 0]])


def test_masked_by_hand():
  got = importance.masked(LOGPS, ROLLOUT, MASK)
  close(got, [[0.5, 3, 0], [4, 0, 0]])  # 1/4 is below the default 1/2
  got = importance.masked(LOGPS, ROLLOUT, MASK, low=0.0, high=3.5)
  close(got, [[0.5, 3, 0], [0, 0.25, 0]])


def test_levels_by_hand():
  # Products 3/2 and 1; geometric means sqrt(3/2) and 1.
  product = importance.truncated(LOGPS, ROLLOUT, MASK, level="sequence-product")
  close(product, [[1.5, 1.5, 0], [1, 1, 0]])
  mean = importance.masked(LOGPS, ROLLOUT, MASK, level="sequence", low=0.5)
  close(mean, [[math.sqrt(1.5)] * 2 + [0], [1, 1, 0]])
  none = importance.masked(
    LOGPS, ROLLOUT, MASK, level="sequence-product", low=0.9, high=1.4
  )
  close(none, [[0, 0, 0], [1, 1, 0]])


def test_unbounded_by_hand():
  close(importance.unbounded(LOGPS, ROLLOUT, MASK), [[0.5, 3, 0], [4, 0.25, 0]])
  product = importance.unbounded(LOGPS, ROLLOUT, MASK, level="sequence-product")
  close(product, [[1.5, 1.5, 0], [1, 1, 0]])


def test_effective_sample_size_by_hand():
  # (0.5 + 3 + 4 + 0.25)^2 / (4 (0.25 + 9 + 16 + 0.0625)) = 60.0625 / 101.25
  weights = np.array([0.5, 3, 4, 0.25])
  size = lambda w: importance.effective_sample_size(w.mean(), (w**2).mean())
  close(size(weights), 60.0625 / 101.25)
  close(size(np.full(4, 0.7)), 1)
  close(size(np.array([0, 0, 0, 2.0])), 1 / 4)
  close(size(np.zeros(4)), 0)


@pytest.mark.parametrize(
  "fn", [importance.unbounded, importance.truncated, importance.masked]
)
def test_weights_are_constants(fn):
  clean = jnp.where(MASK != 0, LOGPS, 0.0)
  gradient = jax.jit(jax.grad(lambda x: fn(x, ROLLOUT, MASK).sum()))(clean)
  np.testing.assert_array_equal(gradient, np.zeros((2, 3)))
  close(jax.jit(fn)(LOGPS, ROLLOUT, MASK), fn(LOGPS, ROLLOUT, MASK))
  close(fn(LOGPS[:1], ROLLOUT[:1], MASK[:1]), fn(LOGPS, ROLLOUT, MASK)[:1])
  np.testing.assert_array_equal(fn(LOGPS, ROLLOUT, 0 * MASK), np.zeros((2, 3)))


def test_a_missing_log_probability_is_not_hidden():
  weights = importance.truncated(LOGPS, ROLLOUT, jnp.ones((2, 3)))
  assert np.isnan(weights[:, 2]).all() and np.isfinite(weights[:, :2]).all()


def test_a_vast_ratio_is_finite():
  got = importance.truncated(
    jnp.array([[0.0]]), jnp.array([[-500.0]]), jnp.ones((1, 1)), cap=math.inf
  )
  close(got, [[math.exp(20.0)]])


def test_bounds_are_checked():
  with pytest.raises(ValueError, match="cap=0 is the largest weight"):
    importance.truncated(LOGPS, ROLLOUT, MASK, cap=0)
  with pytest.raises(ValueError, match=r"low=2\.0, high=1\.0"):
    importance.masked(LOGPS, ROLLOUT, MASK, low=2.0, high=1.0)
  with pytest.raises(ValueError, match="unknown level 'row'"):
    importance.masked(LOGPS, ROLLOUT, MASK, level="row")
