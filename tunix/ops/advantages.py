"""Advantages: how much better a completion, or a token, was than expected.

Rewards of a group (the G completions of one prompt) are [P, G]. `where` marks the
members that have a valid reward: the others get advantage 0 and take no part in any
mean or deviation, so their reward may be NaN. A group without two valid members has
nothing to compare and gets 0; so does a group of equal rewards, exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from tunix.ops.reductions import keep, safe_divide

Rewards = Float[Array, "P G"]
Where = Bool[Array, "P G"]


class _Centered(NamedTuple):
  values: jax.Array  # minus the mean; 0 where not valid
  count: jax.Array  # of valid ones, with the reduced axes kept
  deviation: jax.Array  # of the sample, shaped like count; 0 of fewer than two


def group_normalized(
  rewards: Rewards, epsilon: float = 1e-6, *, where: Where | None = None
) -> Rewards:
  """(r - group mean) / (group deviation + epsilon): GRPO (arXiv:2402.03300).

  The deviation is the sample's (divided by G - 1), as in the libraries of the field;
  the paper does not say. Dividing by it weighs prompts by their difficulty.

  Raises:
    ValueError: groups of one.
  """
  _check_groups(rewards)
  centered = _center(rewards, where, axis=1)
  return safe_divide(centered.values, centered.deviation + epsilon)


def group_centered(rewards: Rewards, *, where: Where | None = None) -> Rewards:
  """r - group mean: Dr. GRPO (arXiv:2503.20783).

  A member is part of its own baseline, so the expected gradient is (G - 1) / G of the
  true one.

  Raises:
    ValueError: groups of one.
  """
  _check_groups(rewards)
  return _center(rewards, where, axis=1).values


def leave_one_out(rewards: Rewards, *, where: Where | None = None) -> Rewards:
  """r - mean of the other members: RLOO (arXiv:2402.14740), unbiased.

  Raises:
    ValueError: groups of one.
  """
  _check_groups(rewards)
  centered = _center(rewards, where, axis=1)
  others = jnp.maximum(centered.count - 1, 1)
  return centered.values * centered.count / others


def batch_normalized(
  rewards: Rewards, epsilon: float = 1e-6, *, where: Where | None = None
) -> Rewards:
  """(r - mean) / (deviation + epsilon) over the whole batch: REINFORCE++
  (arXiv:2501.03262). Groups may have one member."""
  centered = _center(rewards, where, axis=None)
  return safe_divide(centered.values, centered.deviation + epsilon)


def batch_scaled(
  rewards: Rewards, epsilon: float = 1e-6, *, where: Where | None = None
) -> Rewards:
  """(r - group mean) / (deviation of the batch's rewards + epsilon).

  A group's own baseline without the weight by its difficulty (arXiv:2508.08221).

  Raises:
    ValueError: groups of one.
  """
  deviation = _center(rewards, where, axis=None).deviation
  return safe_divide(group_centered(rewards, where=where), deviation + epsilon)


def decoupled(
  estimate: Callable[..., jax.Array],
  rewards: Sequence[Rewards],
  weights: Sequence[float],
  *,
  where: Where | None = None,
) -> Rewards:
  """Of several rewards, each compared by itself before they are added up: the sum of
  weight_k * estimate(rewards_k), normalised over the batch. With `group_normalized`
  this is GDPO (arXiv:2601.05242): in a sum of rewards one with a large spread decides
  alone, and different mixtures of rewards come to equal advantages.

  Args:
    estimate: one of the functions above.
    rewards: one array [P, G] a reward.
    weights: one a reward.
    where: members whose rewards are all valid.
  """
  parts = [w * estimate(r, where=where) for r, w in zip(rewards, weights, strict=True)]
  return batch_normalized(jnp.sum(jnp.stack(parts), axis=0), where=where)


# By name; the second line has names that users of other libraries know.
ADVANTAGES: dict[str, Callable[..., jax.Array]] = {
  "group_normalized": group_normalized,
  "group_centered": group_centered,
  "leave_one_out": leave_one_out,
  "batch_normalized": batch_normalized,
  "batch_scaled": batch_scaled,
  **{"grpo": group_normalized, "drgrpo": group_centered, "rloo": leave_one_out},
}


def gae(
  rewards: Float[Array, "B T"],
  values: Float[Array, "B T"],
  mask: Shaped[Array, "B T"],
  *,
  gamma: float,
  lam: float,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """Generalised advantage estimation (arXiv:1506.02438).

    delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1}

  where t + 1 is the row's next token of the mask; after the last one V and A are 0.

  Args:
    rewards: reward received at each token; ignored where the mask is off.
    values: the critic's estimate before each token.
    mask: 1 on completion tokens; it may have holes (tokens of a tool), over which
      time does not pass.
    gamma: discount a token, in [0, 1].
    lam: 0 trusts the critic (one step), 1 the rewards (Monte Carlo).

  Returns:
    (advantages, returns = advantages + values), 0 where the mask is off.
  """
  valid = mask != 0
  rewards, values = keep(rewards, valid), keep(values, valid)

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
  """(x - mean) / (sample deviation + epsilon) over the mask, 0 elsewhere.

  Of the whole batch: whiten before it is cut into micro-batches.
  """
  return batch_normalized(x, epsilon, where=mask != 0)


def _check_groups(rewards: jax.Array) -> None:
  if rewards.ndim != 2 or rewards.shape[1] < 2:
    raise ValueError(
      f"rewards of shape {rewards.shape} must be [prompts, completions of a prompt] "
      "with at least 2 completions to compare: set num_generations, or use "
      "batch_normalized"
    )


def _center(rewards: jax.Array, where: jax.Array | None, axis: int | None) -> _Centered:
  """Rewards minus their mean along the axis (None: all)."""
  where = jnp.ones(rewards.shape, bool) if where is None else where
  kept = keep(rewards, where)
  # The mean of equal numbers may miss them by a rounding error, which dividing by a
  # deviation as small would blow up: counted from the least reward they are zeros.
  least = jnp.min(
    jnp.where(where, kept, jnp.inf), axis=axis, keepdims=True, initial=jnp.inf
  )
  shifted = jnp.where(where, kept - least, 0.0)
  count = jnp.sum(where, axis=axis, keepdims=True).astype(kept.dtype)
  mean = safe_divide(jnp.sum(shifted, axis=axis, keepdims=True), count)
  values = jnp.where(where, shifted - mean, 0.0)
  squares = jnp.sum(jnp.square(values), axis=axis, keepdims=True)
  return _Centered(values, count, jnp.sqrt(squares / jnp.maximum(count - 1, 1)))
