"""Correction for completions drawn by something other than the policy that is trained.

An engine's log-probabilities differ from ours (other kernels, precision, weights that
lag behind). The loss of a token is multiplied by a bounded weight made from

  w = exp(logps - rollout_logps)

with `logps` those of the policy at the start of the update, computed by us. Bounding
costs bias and saves variance: `truncated` keeps all tokens, `masked` drops those where
the two disagree too much. Levels are those of `policy_gradient.log_ratio`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from tunix.ops import kl
from tunix.ops.policy_gradient import log_ratio
from tunix.ops.reductions import WeightedSum, keep, safe_exp, weighted_sum


class Mismatch(NamedTuple):
  """How far the rollout's log-probabilities are from ours; sums add over batches.

  Attributes:
    difference: mean of |logps - rollout_logps| over tokens, in nats.
    kl: estimate (k3) of KL(rollout || policy) per token, in nats.
    largest: the largest |logps - rollout_logps|, in nats.
  """

  difference: WeightedSum
  kl: WeightedSum
  largest: jax.Array


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


def mismatch(
  logps: Float[Array, "B T"],
  rollout_logps: Float[Array, "B T"],
  mask: Shaped[Array, "B T"],
) -> Mismatch:
  """Figures for a run's metrics; constants."""
  logps, rollout_logps = jax.lax.stop_gradient((logps, rollout_logps))
  difference = jnp.abs(keep(logps, mask) - keep(rollout_logps, mask))
  on = (mask != 0).astype(difference.dtype)
  return Mismatch(
    weighted_sum(difference, on),
    weighted_sum(kl.k3(rollout_logps, logps), on),
    jnp.max(difference, initial=0.0),
  )


def _weights(logps, rollout_logps, mask, level) -> jax.Array:
  logs = jax.lax.stop_gradient(log_ratio(logps, rollout_logps, mask, level))
  return keep(safe_exp(logs), mask)
