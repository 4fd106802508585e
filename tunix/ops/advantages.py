"""Advantages: the reward of a completion, or a token, relative to a baseline.

Rewards are [P, G]. The G completions of one prompt are a group, and each of them is a
member. `where` is True for members with a valid reward. Other members get advantage 0
and are left out of every mean and deviation, so their reward may be NaN. Functions with
a group mean give exactly 0 to all members of a group that has equal rewards, or fewer
than two valid ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Shaped

from tunix.ops.reductions import keep, safe_divide

Rewards = Float[Array, "P G"]
Where = Bool[Array, "P G"]


class _Centered(NamedTuple):
  values: jax.Array  # rewards minus their mean; 0 if not valid
  count: jax.Array  # number of valid rewards, with the reduced axes kept
  deviation: jax.Array  # sample deviation, shaped like count; 0 for fewer than two


def group_normalized(
  rewards: Rewards, epsilon: float = 1e-6, *, where: Where | None = None
) -> Rewards:
  """Returns (r - group mean) / (group deviation + epsilon): GRPO (arXiv:2402.03300).

  The deviation is the sample standard deviation (divisor G - 1), as in other libraries;
  the paper does not specify the divisor. Dividing by it weights prompts by difficulty:
  a prompt that nearly always succeeds or nearly always fails has a small deviation and
  gets large advantages.

  Raises:
    ValueError: the groups have one member.
  """
  _check_groups(rewards)
  centered = _center(rewards, where, axis=1)
  return safe_divide(centered.values, centered.deviation + epsilon)


def group_centered(rewards: Rewards, *, where: Where | None = None) -> Rewards:
  """Returns r - group mean: Dr. GRPO (arXiv:2503.20783).

  The mean includes the member itself, so the expected gradient is (G - 1) / G times the
  true gradient.

  Raises:
    ValueError: the groups have one member.
  """
  _check_groups(rewards)
  return _center(rewards, where, axis=1).values


def leave_one_out(rewards: Rewards, *, where: Where | None = None) -> Rewards:
  """Returns r - mean of the other members: RLOO (arXiv:2402.14740).

  The baseline does not depend on the member itself, so the gradient is unbiased.

  Raises:
    ValueError: the groups have one member.
  """
  _check_groups(rewards)
  centered = _center(rewards, where, axis=1)
  # r_i - (S - r_i) / (n - 1) = (r_i - S / n) n / (n - 1), with S the sum of n rewards.
  others = jnp.maximum(centered.count - 1, 1)
  return centered.values * centered.count / others


def batch_normalized(
  rewards: Rewards, epsilon: float = 1e-6, *, where: Where | None = None
) -> Rewards:
  """Returns (r - mean) / (deviation + epsilon) over the batch: REINFORCE++.

  See arXiv:2501.03262. Groups may have one member.
  """
  centered = _center(rewards, where, axis=None)
  return safe_divide(centered.values, centered.deviation + epsilon)


def batch_scaled(
  rewards: Rewards, epsilon: float = 1e-6, *, where: Where | None = None
) -> Rewards:
  """Returns (r - group mean) / (deviation of the batch + epsilon).

  The baseline is the group mean, as in GRPO. One deviation for the whole batch avoids
  GRPO's weighting by difficulty (arXiv:2508.08221).

  Raises:
    ValueError: the groups have one member.
  """
  deviation = _center(rewards, where, axis=None).deviation
  return safe_divide(group_centered(rewards, where=where), deviation + epsilon)


def centered_normalized(
  rewards: Rewards, epsilon: float = 1e-6, *, where: Where | None = None
) -> Rewards:
  """Returns (r - group mean), normalized over the batch: REINFORCE++ with a baseline.

  See arXiv:2501.03262. `batch_scaled` divides by the deviation of the rewards; this
  divides by that of the centered rewards, which does not grow with the difference of
  the prompts.

  Raises:
    ValueError: the groups have one member.
  """
  return batch_normalized(group_centered(rewards, where=where), epsilon, where=where)


def mean_normalized(rewards: Rewards, *, where: Where | None = None) -> Rewards:
  """Returns (r - group mean) / group mean: MaxRL (arXiv:2602.02710).

  A group of mean 0 has only rewards of 0 and gets 0. With rewards 0 and 1, success rate
  p and G members, the expected gradient is that of -sum over k < G of (1 - p)^k / k,
  the first G - 1 terms of the series of log p: hard prompts count more.

  Raises:
    ValueError: the groups have one member, or a reward is negative.
  """
  centered = group_centered(rewards, where=where)
  valid = jnp.ones(rewards.shape, bool) if where is None else where
  least = jnp.min(jnp.asarray(rewards), where=valid, initial=0.0)
  # Traced rewards have no value yet; those of a learner have.
  if not isinstance(least, Tracer) and least < 0:
    raise ValueError(
      f"a reward is {least}; expected at least 0, because mean_normalized (MaxRL) "
      "divides by the mean of a group. Change the rewards, for example to 0 and 1"
    )
  total = jnp.sum(jnp.asarray(rewards), axis=1, keepdims=True, where=valid)
  count = jnp.sum(valid, axis=1, keepdims=True)
  return safe_divide(centered * count, total)


def decoupled(
  estimate: Callable[..., jax.Array],
  rewards: Sequence[Rewards],
  weights: Sequence[float],
  *,
  where: Where | None = None,
) -> Rewards:
  """Returns sum_k weight_k * estimate(rewards_k), normalized over the batch.

  Advantages are computed for each reward separately and then added. If the rewards were
  added first, a reward with a large spread would dominate the others, and different
  combinations of rewards could give equal advantages. With `group_normalized` this is
  GDPO (arXiv:2601.05242).

  Args:
    estimate: a function from `ADVANTAGES`.
    rewards: one array [P, G] for each reward.
    weights: one number for each reward.
    where: bool [P, G], True for members whose rewards are all valid; None for all.
  """
  parts = [w * estimate(r, where=where) for r, w in zip(rewards, weights, strict=True)]
  return batch_normalized(jnp.sum(jnp.stack(parts), axis=0), where=where)


# Name -> function. The last line has the names that other libraries use.
ADVANTAGES: dict[str, Callable[..., jax.Array]] = {
  "group_normalized": group_normalized,
  "group_centered": group_centered,
  "leave_one_out": leave_one_out,
  "batch_normalized": batch_normalized,
  "batch_scaled": batch_scaled,
  "centered_normalized": centered_normalized,
  "mean_normalized": mean_normalized,
  **{"grpo": group_normalized, "drgrpo": group_centered, "rloo": leave_one_out},
}
# Estimators of `ADVANTAGES` that are 0 in a group with equal rewards.
GROUPED = tuple(name for name in ADVANTAGES if name != "batch_normalized")


def gae(
  rewards: Float[Array, "B T"],
  values: Float[Array, "B T"],
  mask: Shaped[Array, "B T"],
  *,
  gamma: float,
  lam: float,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """Returns advantages by generalized advantage estimation (arXiv:1506.02438).

    delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1}

  where t + 1 is the next token of the row with mask 1. After the last such token, V and
  A are 0.

  Args:
    rewards: reward received at each token; ignored where the mask is 0.
    values: the critic's estimate before each token.
    mask: 1 on completion tokens. Tokens of a tool's output have mask 0 and are skipped:
      they are not time steps.
    gamma: discount per token, in [0, 1].
    lam: lambda, in [0, 1]. With 0, A is the one-step error delta. With 1, A is the
      discounted sum of rewards minus V (Monte Carlo).

  Returns:
    (advantages, returns), with returns = advantages + values; 0 where the mask is 0.
  """
  valid = mask != 0
  rewards, values = keep(rewards, valid), keep(values, valid)

  # The scan runs over tokens from the last to the first. At a token with mask 0 the
  # carry stays the same, so the token before it sees the next token with mask 1.
  def step(carry, column):
    next_value, next_advantage = carry
    reward, value, on = column
    delta = reward + gamma * next_value - value
    advantage = delta + gamma * lam * next_advantage
    carry = jnp.where(on, value, next_value), jnp.where(on, advantage, next_advantage)
    return carry, jnp.where(on, advantage, 0.0)

  start = (jnp.zeros(rewards.shape[:1], rewards.dtype),) * 2
  columns = (rewards.T, values.T, valid.T)
  _, advantages = jax.lax.scan(step, start, columns, reverse=True)
  return advantages.T, advantages.T + values


def whiten(
  x: Float[Array, "B T"], mask: Shaped[Array, "B T"], epsilon: float = 1e-6
) -> Float[Array, "B T"]:
  """Returns (x - mean) / (sample deviation + epsilon), and 0 where the mask is 0.

  Mean and deviation are over tokens with mask 1. Call it with the whole batch, before
  the split into micro-batches, so that all micro-batches share them.
  """
  return batch_normalized(x, epsilon, where=mask != 0)


def _check_groups(rewards: jax.Array) -> None:
  if rewards.ndim != 2 or rewards.shape[1] < 2:
    raise ValueError(
      f"rewards have shape {rewards.shape}; expected [prompts, completions per prompt] "
      "with at least 2 completions to compare. Raise num_generations, or use "
      "batch_normalized"
    )


def _center(rewards: jax.Array, where: jax.Array | None, axis: int | None) -> _Centered:
  """Returns rewards minus their mean, with their number and sample deviation.

  Args:
    rewards: rewards [P, G].
    where: True for valid rewards; None if all are valid.
    axis: axis of the mean; None for all axes.
  """
  # NumPy arrays are subtracted in float64, before JAX rounds them to float32, in which
  # 1e8 and 1e8 + 1 are one number.
  # NumPy cannot read a mask that is traced.
  on_device = isinstance(rewards, jax.Array) or isinstance(where, Tracer)
  xp: Any = jnp if on_device else rewards.__array_namespace__()
  valid = xp.ones(rewards.shape, bool) if where is None else where
  finite = (
    keep(rewards, valid) if xp is jnp else xp.where(valid, xp.float64(rewards), 0)
  )
  # The mean of equal numbers may differ from them by a rounding error. Dividing this
  # error by an equally small deviation would give advantages near 1. The smallest
  # reward is therefore subtracted first: equal rewards then are exactly 0.
  least = xp.min(
    xp.where(valid, finite, jnp.inf), axis=axis, keepdims=True, initial=jnp.inf
  )
  shifted = jnp.asarray(xp.where(valid, finite - least, 0.0))
  count = jnp.sum(valid, axis=axis, keepdims=True).astype(shifted.dtype)
  mean = safe_divide(jnp.sum(shifted, axis=axis, keepdims=True), count)
  values = jnp.where(valid, shifted - mean, 0.0)
  squares = jnp.sum(jnp.square(values), axis=axis, keepdims=True)
  # The divisor is count - 1 (sample deviation), and 1 for fewer than two rewards.
  return _Centered(values, count, jnp.sqrt(squares / jnp.maximum(count - 1, 1)))
