"""Pairs whose losses can be computed by hand, and random ones."""

import math

import jax.numpy as jnp
import numpy as np

from tunix.ops.pair_losses import PairScores

LN2, LN3 = math.log(2), math.log(3)


def hand(extra=()):
  """Two pairs for beta = 1/2: beta C is (ln 3, 0), beta R is (-ln 2, ln 2).

  So s(beta C) = (3/4, 1/2), s(beta R) = (1/3, 2/3) and with beta D = (ln 6, -ln 2)
  s(beta D) = (6/7, 1/3). Lengths are (2, 5) and (4, 1).
  """
  chosen, rejected = np.array([2 * LN3, 0]), np.array([-2 * LN2, 2 * LN2])
  references = np.array([-10.0, -7.0]), np.array([-7.0, -9.0])
  sums = chosen + references[0], rejected + references[1], *references
  columns = *sums, [2, 5], [4, 1], [1, 1]
  return PairScores(*(jnp.array([*x, *extra], jnp.float32) for x in columns))


def random(pairs, seed=0):
  rng = np.random.default_rng(seed)
  sums = -rng.uniform(3, 9, (4, pairs))
  counts = rng.integers(3, 9, (2, pairs))
  columns = *sums, *counts, np.ones(pairs)
  return PairScores(*(jnp.array(x, jnp.float32) for x in columns))


def close(got, want, tolerance=1e-5):
  np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
