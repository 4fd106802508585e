"""Importance weights for completions that another engine or older weights sampled.

The log-probabilities of a rollout engine differ from the trainer's: the engine has
other kernels and another precision, and its weights may be older. The loss of a token
is multiplied by a bounded weight computed from

  w = exp(logps - rollout_logps)

where `logps` are the trainer's log-probabilities at the start of the update. A bound
adds bias and reduces variance: `unbounded` has none, `truncated` keeps all tokens,
`masked` drops tokens where both engines disagree too much. Levels are those of
`policy_gradient.log_ratio`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from tunix.ops.policy_gradient import log_ratio
from tunix.ops.reductions import keep, safe_divide, safe_exp


def unbounded(
  logps: Float[Array, "B T"],
  rollout_logps: Float[Array, "B T"],
  mask: Shaped[Array, "B T"],
  *,
  level: str = "token",
) -> Float[Array, "B T"]:
  """Returns w: the weight of decoupled PPO (arXiv:2110.00641; AReaL, arXiv:2505.24298).

  Decoupled PPO clips the ratio of the trained policy to a proximal policy, the trainer
  at the start of the update, and weighs the clipped loss by the ratio of the proximal
  policy to the policy that sampled. `safe_exp` bounds w by exp(20).

  Args:
    logps, rollout_logps, mask, level: as for `truncated`.

  Returns:
    Weights without gradient, 0 outside the mask.

  Raises:
    ValueError: the level is unknown.
  """
  logs = jax.lax.stop_gradient(log_ratio(logps, rollout_logps, mask, level))
  return keep(safe_exp(logs), mask)


def truncated(
  logps: Float[Array, "B T"],
  rollout_logps: Float[Array, "B T"],
  mask: Shaped[Array, "B T"],
  *,
  level: str = "token",
  cap: float = 2.0,
) -> Float[Array, "B T"]:
  """Returns min(w, cap): truncated importance sampling (Ionides 2008).

  Its use for rollout engines is described at
  https://fengyao.notion.site/off-policy-rl.

  Args:
    logps: log-probabilities of the trainer before the update, in nats.
    rollout_logps: log-probabilities that the engine reported, in nats.
    mask: 1 on completion tokens.
    level: a name of `policy_gradient.LEVELS`.
    cap: largest weight, > 0.

  Returns:
    Weights without gradient, 0 outside the mask.

  Raises:
    ValueError: the level is unknown, or cap <= 0.
  """
  if cap <= 0:
    raise ValueError(f"cap={cap} is the largest weight; expected a number above 0")
  weights = unbounded(logps, rollout_logps, mask, level=level)
  return jnp.minimum(weights, cap)


def masked(
  logps: Float[Array, "B T"],
  rollout_logps: Float[Array, "B T"],
  mask: Shaped[Array, "B T"],
  *,
  level: str = "token",
  low: float = 0.5,
  high: float = 5.0,
) -> Float[Array, "B T"]:
  """Returns w if low <= w <= high, else 0: masked importance sampling.

  At token level it is IcePop (arXiv:2510.18855). A token of weight 0 is still counted
  as a token when the loss is averaged.

  Args:
    logps, rollout_logps, mask, level: as for `truncated`.
    low, high: smallest and largest weight, 0 <= low < high.

  Returns:
    Weights without gradient, 0 outside the mask.

  Raises:
    ValueError: the level is unknown, or the bounds are out of range.
  """
  if not 0 <= low < high:
    raise ValueError(
      f"low={low}, high={high}: expected 0 <= low < high, the bounds of kept weights"
    )
  weights = unbounded(logps, rollout_logps, mask, level=level)
  return jnp.where((weights >= low) & (weights <= high), weights, 0.0)


def effective_sample_size(mean: jax.Array, mean_of_squares: jax.Array) -> jax.Array:
  """Returns (sum w)^2 / (n sum w^2), from the means of n weights w and their squares.

  It is the share of the n tokens that equally weighted tokens would need for the same
  variance of a weighted mean (Kish 1965): 1 if all weights are equal, 1 / n if only one
  is not 0, and 0 if all are 0.
  """
  # The square of a mean is at most the mean of squares; rounding can exceed it.
  return jnp.minimum(safe_divide(jnp.square(mean), mean_of_squares), 1.0)
