"""Correction for completions drawn by something other than the policy that is trained.

An engine's log-probabilities differ from ours (other kernels, precision, weights that
lag behind). The loss of a token is multiplied by a bounded weight made from

  w = exp(logps - rollout_logps)

with `logps` those of the policy at the start of the update, computed by us. Bounding
costs bias and saves variance: `truncated` keeps all tokens, `masked` drops those where
the two disagree too much. Levels are those of `policy_gradient.log_ratio`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from tunix.ops.policy_gradient import log_ratio
from tunix.ops.reductions import keep, safe_exp


def truncated(
  logps: Float[Array, "B T"],
  rollout_logps: Float[Array, "B T"],
  mask: Shaped[Array, "B T"],
  *,
  level: str = "token",
  cap: float = 2.0,
) -> Float[Array, "B T"]:
  """min(w, cap): truncated importance sampling (Ionides 2008; for engines,
  https://fengyao.notion.site/off-policy-rl).

  Args:
    logps: ours, before the update.
    rollout_logps: as the engine reported them when it drew the tokens.
    mask: 1 on completion tokens.
    level: one of `policy_gradient.LEVELS`.
    cap: the greatest weight, > 0.

  Returns:
    Constant weights, 0 outside the mask.

  Raises:
    ValueError: an unknown level, or cap <= 0.
  """
  if cap <= 0:
    raise ValueError(f"cap={cap} must be positive: it is the greatest weight")
  weights = _weights(logps, rollout_logps, mask, level)
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
  """w where low <= w <= high, else 0: masked importance sampling (IcePop,
  arXiv:2510.18855, with token level).

  Args, Returns and Raises as for `truncated`; 0 <= low < high. A dropped token still
  counts in the weight of its aggregation.
  """
  if not 0 <= low < high:
    raise ValueError(
      f"low={low}, high={high}: weights are kept in [low, high], low < high"
    )
  weights = _weights(logps, rollout_logps, mask, level)
  return jnp.where((weights >= low) & (weights <= high), weights, 0.0)


def _weights(logps, rollout_logps, mask, level) -> jax.Array:
  logs = jax.lax.stop_gradient(log_ratio(logps, rollout_logps, mask, level))
  return keep(safe_exp(logs), mask)
