"""Losses of a policy (and a critic) per token, from log-probabilities and advantages.

Every loss is "B T" and to be minimised; `ops.reductions.aggregate` makes one number of
it. Advantages are data (no gradient passes), one per row "B" or one per token "B T".
The ratio of the policies comes in as its logarithm, from `log_ratio`, so that an
algorithm is ratio x loss x advantage x aggregation. Entropy is a term that the caller
subtracts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from tunix.ops.reductions import keep, safe_divide, safe_exp

Advantages = Float[Array, " B"] | Float[Array, "B T"]


class PolicyLoss(NamedTuple):
  """A loss per token and where it was clipped.

  Attributes:
    values: float [B, T].
    clipped: bool [B, T], for metrics: the bound and not the ratio made the value.
  """

  values: jax.Array
  clipped: jax.Array


def log_ratio(
  logps: Float[Array, "B T"],
  old_logps: Float[Array, "B T"] | None,
  mask: Shaped[Array, "B T"],
  level: str = "token",
) -> Float[Array, "B T"]:
  """Logarithm of the ratio pi / pi_old that a token's loss is weighted with.

  Levels, with d_t = logps_t - old_logps_t over the n tokens of a row:

    token              d_t (PPO, GRPO)
    sequence           sum_t d_t / n for all tokens: GSPO (arXiv:2507.18071), in its
                       token form: the value is the sequence's, the gradient at token t
                       that of logps_t alone. Under sequence-mean-token-mean that is
                       the paper's gradient, and advantages may differ by token.
    sequence-product   sum_t d_t for all tokens, the true ratio of two completions
                       (RLOO). Each token carries the whole gradient: aggregate with
                       sequence-mean-token-mean.

  Args:
    logps: under the policy being trained.
    old_logps: under the policy that the update started from; None: the same as
      `logps` (the ratio is exactly 1, its gradient is not 0).
    mask: 1 on completion tokens; 0 is returned elsewhere.
    level: one of `LEVELS`.

  Raises:
    ValueError: an unknown level.
  """
  if level not in LEVELS:
    raise ValueError(f"unknown level {level!r}: use one of {list(LEVELS)}")
  old = jax.lax.stop_gradient(logps if old_logps is None else old_logps)
  return LEVELS[level](keep(logps, mask) - keep(old, mask), mask != 0)


def _sequence(difference: jax.Array, mask: jax.Array) -> jax.Array:
  total = jnp.sum(difference, axis=1, keepdims=True)
  mean = safe_divide(total, jnp.sum(mask, axis=1, keepdims=True).astype(total.dtype))
  only_gradient = difference - jax.lax.stop_gradient(difference)
  return keep(jax.lax.stop_gradient(mean) + only_gradient, mask)


def _sequence_product(difference: jax.Array, mask: jax.Array) -> jax.Array:
  total = jnp.sum(difference, axis=1, keepdims=True)
  return keep(jnp.broadcast_to(total, mask.shape), mask)


# What a level makes of the differences [B, T] (0 outside the mask).
LEVELS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
  "token": lambda difference, mask: difference,
  "sequence": _sequence,
  "sequence-product": _sequence_product,
}


def clipped_loss(
  log_ratio: Float[Array, "B T"],
  advantages: Advantages,
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  dual_clip: float | None = None,
) -> PolicyLoss:
  """-min(w A, clip(w, 1 - clip_low, 1 + clip_high) A): PPO (arXiv:1707.06347).

  So w counts up to 1 + clip_high where A >= 0 and from 1 - clip_low up where A < 0.
  With clip_high > clip_low it is DAPO's clip-higher (arXiv:2503.14476). The ratio is
  cut at exp(20).

  Args:
    log_ratio: log w.
    advantages: "B" or "B T".
    clip_low: how far below 1 the ratio may fall before it stops paying, in [0, 1].
    clip_high: how far above 1, >= 0.
    dual_clip: the largest ratio that counts where A < 0 (arXiv:1912.09729; 3 is
      usual), above 1 + clip_high; None: no bound.

  Raises:
    ValueError: bounds out of these ranges.
  """
  _check_clip(clip_low, clip_high)
  if dual_clip is not None and dual_clip <= 1 + clip_high:
    raise ValueError(
      f"dual_clip={dual_clip} must be above 1 + clip_high={1 + clip_high}: it bounds "
      "the ratio of tokens with negative advantage"
    )
  ratio, advantages = safe_exp(log_ratio), _per_token(advantages)
  most = jnp.inf if dual_clip is None else dual_clip
  good = advantages >= 0
  counted = jnp.where(
    good, jnp.minimum(ratio, 1 + clip_high), jnp.clip(ratio, 1 - clip_low, most)
  )
  too_low, too_high = ratio < 1 - clip_low, ratio > 1 + clip_high
  clipped = jnp.where(good, too_high, too_low | (ratio > most))
  return PolicyLoss(-counted * advantages, clipped & (advantages != 0))


def cispo_loss(
  log_ratio: Float[Array, "B T"],
  logps: Float[Array, "B T"],
  advantages: Advantages,
  *,
  clip_low: float = 1.0,
  clip_high: float = 4.0,
) -> PolicyLoss:
  """-stop_gradient(clip(w, 1 - clip_low, 1 + clip_high)) A logps: CISPO
  (arXiv:2506.13585).

  The weight is bounded, no token's gradient is dropped. Bounds are relative to 1 as
  in `clipped_loss`: the defaults let w be in [0, 5].

  Args:
    log_ratio: log w.
    logps: differentiated.
    advantages: "B" or "B T".
    clip_low: in [0, 1]; 1: no lower bound.
    clip_high: >= 0.

  Raises:
    ValueError: bounds out of these ranges.
  """
  _check_clip(clip_low, clip_high)
  ratio = safe_exp(log_ratio)
  weight = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
  # A constant factor of the advantage, and so outside of the gradient.
  values = reinforce_loss(logps, weight * _per_token(advantages))
  return PolicyLoss(values, weight != ratio)


def reinforce_loss(
  logps: Float[Array, "B T"], advantages: Advantages
) -> Float[Array, "B T"]:
  """-A logps: the policy gradient itself, on samples of the policy (Williams 1992)."""
  return -_per_token(advantages) * logps


def value_loss(
  values: Float[Array, "B T"],
  returns: Float[Array, "B T"],
  old_values: Float[Array, "B T"] | None = None,
  clip: float | None = None,
) -> PolicyLoss:
  """(V - R)^2 / 2, or with a clip the greater of it and that of the clipped V.

  The clipped V is within +-clip of `old_values`, so that one update cannot move the
  critic far for one batch (the form of PPO's reference implementation).

  Args:
    values: the critic's estimates, differentiated.
    returns: what they should be, from `advantages.gae`.
    old_values: the estimates that the returns were made with.
    clip: in units of reward, > 0.

  Raises:
    ValueError: one of `old_values` and `clip` without the other, or clip <= 0.
  """
  returns = jax.lax.stop_gradient(returns)
  plain = jnp.square(values - returns) / 2
  if old_values is None and clip is None:
    return PolicyLoss(plain, jnp.zeros(plain.shape, bool))
  if old_values is None or clip is None or clip <= 0:
    raise ValueError(
      f"value clip={clip} with old_values "
      f"{'missing' if old_values is None else 'given'}: give both (clip > 0) or neither"
    )
  old_values = jax.lax.stop_gradient(old_values)
  near = old_values + jnp.clip(values - old_values, -clip, clip)
  bounded = jnp.square(near - returns) / 2
  return PolicyLoss(jnp.maximum(plain, bounded), bounded > plain)


def _per_token(advantages: jax.Array) -> jax.Array:
  advantages = jax.lax.stop_gradient(advantages)
  return advantages[:, None] if advantages.ndim == 1 else advantages


def _check_clip(clip_low: float, clip_high: float) -> None:
  if not 0 <= clip_low <= 1 or clip_high < 0:
    raise ValueError(
      f"clip_low={clip_low} must be in [0, 1] and clip_high={clip_high} >= 0: the "
      "ratio is kept in [1 - clip_low, 1 + clip_high]"
    )
