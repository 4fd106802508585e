"""Sums with their weights, and how they become one number.

A loss over a global batch must not depend on how the batch is cut. So parts return a
sum and its weight, parts are added, and one division happens at the very end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# exp(20) is 4.9e8: no ratio of two policies beyond it means anything, and products with
# it stay finite in float32 (exp overflows at 88).
MAX_EXPONENT = 20.0


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


def safe_exp(x: jax.Array) -> jax.Array:
  """exp of x cut to [-20, 20]: finite, with no gradient beyond the cut."""
  return jnp.exp(jnp.clip(x, -MAX_EXPONENT, MAX_EXPONENT))


def keep(values: jax.Array, mask: jax.Array) -> jax.Array:
  """`values` where the mask is on and 0 elsewhere, in float32 or wider.

  What is differentiated goes through this BEFORE anything is computed from it: then
  NaN in a masked place reaches neither the value nor the gradient.
  """
  dtype = jnp.promote_types(values.dtype, jnp.float32)
  return jnp.where(mask != 0, values.astype(dtype), 0.0)


def weighted_sum(values: jax.Array, weights: jax.Array) -> WeightedSum:
  """Sums `values * weights` over all axes, in float32 or wider.

  Args:
    values: any shape, for example per-token losses [B, T].
    weights: the same shape; entries with weight 0 contribute nothing, even when the
      value there is not finite.
  """
  kept = keep(values, weights)
  weights = weights.astype(kept.dtype)
  return WeightedSum(jnp.sum(kept * weights), jnp.sum(weights))


def aggregate(
  values: Float[Array, "B T"],
  mask: Int[Array, "B T"] | Bool[Array, "B T"] | Float[Array, "B T"],
  mode: str = "token-mean",
  *,
  max_tokens: int | None = None,
) -> WeightedSum:
  """Per-token values of a batch as a sum and its weight, by the name of the mean.

  The mean is over the whole global batch: add the sums of its micro-batches, then
  call `mean()` once. With n_i tokens in sequence i:

    token-mean                  sum_it x_it / sum_i n_i: every token counts the same
                                (DAPO, arXiv:2503.14476)
    sequence-mean-token-mean    mean_i of sum_t x_it / n_i: every sequence counts the
                                same, so that a token of a long one counts less (GRPO,
                                arXiv:2402.03300)
    sequence-mean-token-sum     mean_i of sum_t x_it (RLOO, REINFORCE)
    sequence-mean-token-scale   mean_i of sum_t x_it / max_tokens (Dr. GRPO,
                                arXiv:2503.20783)

  Args:
    values: anything per token, of any value where the mask is off.
    mask: 1 on trained tokens. Rows without any (padding, dropped completions) are no
      sequences: they do not count in the weight.
    mode: one of `AGGREGATIONS`.
    max_tokens: the constant of sequence-mean-token-scale, usually the most tokens a
      completion may have; only that mode takes it.

  Raises:
    ValueError: an unknown mode; `max_tokens` missing, or given to another mode.
  """
  if mode not in AGGREGATIONS:
    raise ValueError(f"unknown aggregation {mode!r}: use one of {list(AGGREGATIONS)}")
  scaled = mode == "sequence-mean-token-scale"
  if scaled != (max_tokens is not None) or (max_tokens is not None and max_tokens < 1):
    raise ValueError(
      f"max_tokens={max_tokens} with aggregation {mode!r}: sequence-mean-token-scale "
      "needs a positive max_tokens, the other modes take none"
    )
  mask = mask.astype(jnp.promote_types(values.dtype, jnp.float32))
  sums = jnp.sum(keep(values, mask) * mask, axis=1)
  return AGGREGATIONS[mode](sums, jnp.sum(mask, axis=1), max_tokens or 1)


def _sequence_mean(sums: jax.Array, lengths: jax.Array) -> WeightedSum:
  return WeightedSum(jnp.sum(sums), jnp.sum((lengths > 0).astype(sums.dtype)))


# How the sums [B] of the rows, their numbers of tokens [B] and max_tokens make a mean.
AGGREGATIONS: dict[str, Callable[[jax.Array, jax.Array, int], WeightedSum]] = {
  "token-mean": lambda sums, n, _: WeightedSum(jnp.sum(sums), jnp.sum(n)),
  "sequence-mean-token-mean": lambda sums, n, _: _sequence_mean(
    safe_divide(sums, n), n
  ),
  "sequence-mean-token-sum": lambda sums, n, _: _sequence_mean(sums, n),
  "sequence-mean-token-scale": lambda sums, n, scale: _sequence_mean(sums / scale, n),
}
