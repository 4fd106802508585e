"""Sums with their weights, and how they become one number.

A loss over a global batch must not depend on how the batch is cut. So parts return a
sum and its weight, parts are added, and one division happens at the very end.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class WeightedSum(NamedTuple):
  """A sum and the weight it is to be divided by (tokens, sequences, examples).

  Attributes:
    total: scalar, differentiable.
    weight: scalar, treated as a constant.
  """

  total: jax.Array
  weight: jax.Array

  def mean(self) -> jax.Array:
    """total / weight; 0 when nothing has weight."""
    return safe_divide(self.total, self.weight)


def safe_divide(total: jax.Array, weight: jax.Array) -> jax.Array:
  """total / weight, and 0 where the weight is 0 (with zero gradient)."""
  empty = weight == 0
  return jnp.where(empty, 0.0, total / jnp.where(empty, 1.0, weight))


def weighted_sum(values: jax.Array, weights: jax.Array) -> WeightedSum:
  """Sums `values * weights` over all axes.

  Args:
    values: any shape, for example per-token losses [B, T].
    weights: the same shape; entries with weight 0 contribute nothing, even when the
      value there is not finite.
  """
  weights = weights.astype(jnp.float32)
  kept = jnp.where(weights != 0, values.astype(jnp.float32), 0.0)
  return WeightedSum(jnp.sum(kept * weights), jnp.sum(weights))
