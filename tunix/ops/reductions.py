"""Weighted sums, and the means that losses make of them.

A loss over a global batch must not depend on the split into micro-batches. Each
micro-batch therefore returns a sum and its weight. Sums and weights of all
micro-batches are added, and one division at the end gives the mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Bound of exponents. exp(20) is 4.9e8, which is larger than any useful ratio of two
# policies, and products with it stay finite in float32, where exp overflows at 88.
MAX_EXPONENT = 20.0


class WeightedSum(NamedTuple):
  """A sum and its weight, a number of tokens, sequences or examples.

  Attributes:
    total: scalar, differentiable.
    weight: scalar, a constant for differentiation.
  """

  total: jax.Array
  weight: jax.Array

  def mean(self) -> jax.Array:
    """Returns total / weight, and 0 if the weight is 0."""
    return safe_divide(self.total, self.weight)


def safe_divide(total: jax.Array, weight: jax.Array) -> jax.Array:
  """Returns total / weight, and 0 with gradient 0 where the weight is 0."""
  empty = weight == 0
  # The inner `where` keeps the unused branch finite. Without it, the gradient would be
  # NaN, because differentiation multiplies the infinite derivative by 0.
  return jnp.where(empty, 0.0, total / jnp.where(empty, 1.0, weight))


def safe_exp(x: jax.Array) -> jax.Array:
  """Returns exp of x clipped to [-20, 20]; the gradient outside is 0."""
  return jnp.exp(jnp.clip(x, -MAX_EXPONENT, MAX_EXPONENT))


def keep(values: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns `values` where the mask is not 0, and 0 elsewhere, in float32 or wider.

  Apply it to differentiated arrays BEFORE computing with them: then a NaN in a masked
  place reaches neither the value nor the gradient.
  """
  dtype = jnp.promote_types(values.dtype, jnp.float32)
  return jnp.where(mask != 0, values.astype(dtype), 0.0)


def weighted_sum(values: jax.Array, weights: jax.Array) -> WeightedSum:
  """Returns the sum of `values * weights` over all axes, in float32 or wider.

  Args:
    values: any shape, for example losses per token [B, T].
    weights: the same shape. An entry of weight 0 contributes 0, even if its value is
      not finite.
  """
  kept = keep(values, weights)
  weights = weights.astype(kept.dtype)
  return WeightedSum(jnp.sum(kept * weights), jnp.sum(weights))


def span_sums(
  values: Float[Array, "B T"], ends: Int[Array, "B T"]
) -> Float[Array, "B T"]:
  """Returns the sum over the span of each position, at every position of the span.

  Only values of the span are added, in a fixed order, the same in every run.

  Args:
    values: a value per position.
    ends: position of the last one of its span; spans lie one after the other.
  """
  begins = jnp.pad(ends[:, 1:] != ends[:, :-1], ((0, 0), (1, 0)), constant_values=True)

  def add(left, right):
    (started, total), (starts, value) = left, right
    return started | starts, jnp.where(starts, value, total + value)

  _, totals = jax.lax.associative_scan(add, (begins, values), axis=1)
  return jnp.take_along_axis(totals, ends, axis=1)


def aggregate(
  values: Float[Array, "B T"],
  mask: Int[Array, "B T"] | Bool[Array, "B T"] | Float[Array, "B T"],
  mode: str = "token-mean",
  *,
  max_tokens: int | None = None,
) -> WeightedSum:
  """Reduces values per token to a weighted sum whose `mean()` is the mean of this mode.

  The mean is over the global batch: add the sums of its micro-batches, then call
  `mean()` once. Modes, with n_i tokens in sequence i:

    token-mean                  sum_it x_it / sum_i n_i: all tokens count equally
                                (DAPO, arXiv:2503.14476)
    sequence-mean-token-mean    mean_i of sum_t x_it / n_i: all sequences count equally,
                                so that a token of a long one counts less (GRPO,
                                arXiv:2402.03300)
    sequence-mean-token-sum     mean_i of sum_t x_it (RLOO, REINFORCE)
    sequence-mean-token-scale   mean_i of sum_t x_it / max_tokens (Dr. GRPO,
                                arXiv:2503.20783)

  Args:
    values: a value per token; any value, even NaN, where the mask is 0.
    mask: 1 on trained tokens. A row without trained tokens (padding, a dropped
      completion) does not count as a sequence and has weight 0.
    mode: a name from `AGGREGATIONS`.
    max_tokens: constant of sequence-mean-token-scale, usually the longest allowed
      completion; other modes take None.

  Raises:
    ValueError: the mode is unknown, or `max_tokens` is missing or given to another
      mode.
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


# Mode -> (sums of the rows [B], their numbers of tokens [B], max_tokens) -> weighted
# sum.
AGGREGATIONS: dict[str, Callable[[jax.Array, jax.Array, int], WeightedSum]] = {
  "token-mean": lambda sums, n, _: WeightedSum(jnp.sum(sums), jnp.sum(n)),
  "sequence-mean-token-mean": lambda sums, n, _: _sequence_mean(
    safe_divide(sums, n), n
  ),
  "sequence-mean-token-sum": lambda sums, n, _: _sequence_mean(sums, n),
  "sequence-mean-token-scale": lambda sums, n, scale: _sequence_mean(sums / scale, n),
}
