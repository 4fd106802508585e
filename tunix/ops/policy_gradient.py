"""Losses of a policy and of a critic per token, from log-probabilities and advantages.

Every loss is [B, T] and is minimized; `ops.reductions.aggregate` reduces it to one
number. Advantages have no gradient. They are [B], one per row, or [B, T], one per
token. Losses take the logarithm of the ratio w = pi / pi_old of two policies, from
`log_ratio`. An algorithm is therefore a choice of ratio, loss, advantage and
aggregation. The caller subtracts an entropy term.
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
  """A loss per token.

  Attributes:
    values: losses, float [B, T].
    clipped: bool [B, T], True where a bound replaced the ratio; for metrics.
  """

  values: jax.Array
  clipped: jax.Array


def log_ratio(
  logps: Float[Array, "B T"],
  old_logps: Float[Array, "B T"] | None,
  mask: Shaped[Array, "B T"],
  level: str = "token",
) -> Float[Array, "B T"]:
  """Returns the logarithm of the ratio pi / pi_old for each token.

  Levels, with d_t = logps_t - old_logps_t over the n tokens of a row:

    token              d_t (PPO, GRPO)
    sequence           sum_t d_t / n at every token: GSPO (arXiv:2507.18071) in its
                       token form. Every token has the same value, but the gradient at
                       token t is only that of logps_t. With the aggregation
                       sequence-mean-token-mean this is the gradient of the paper, and
                       advantages may differ by token.
    sequence-product   sum_t d_t at every token, the logarithm of the ratio of the
                       probabilities of the whole completion (RLOO). Every token has
                       the gradient of the whole sum, so only the aggregation
                       sequence-mean-token-mean counts this gradient once.

  Args:
    logps: log-probabilities under the trained policy, in nats.
    old_logps: log-probabilities under the policy before the update. None uses the value
      of `logps` without gradient: the ratio is exactly 1, and its gradient is not 0.
    mask: 1 on completion tokens; the result is 0 elsewhere.
    level: a name from `LEVELS`.

  Raises:
    ValueError: the level is unknown.
  """
  if level not in LEVELS:
    raise ValueError(f"unknown level {level!r}: use one of {list(LEVELS)}")
  old = jax.lax.stop_gradient(logps if old_logps is None else old_logps)
  return LEVELS[level](keep(logps, mask) - keep(old, mask), mask != 0)


def _sequence(difference: jax.Array, mask: jax.Array) -> jax.Array:
  total = jnp.sum(difference, axis=1, keepdims=True)
  mean = safe_divide(total, jnp.sum(mask, axis=1, keepdims=True).astype(total.dtype))
  # The value is 0 and the derivative is that of the token's own log-probability. Added
  # to the mean without gradient, it gives the token form of GSPO.
  only_gradient = difference - jax.lax.stop_gradient(difference)
  return keep(jax.lax.stop_gradient(mean) + only_gradient, mask)


def _sequence_product(difference: jax.Array, mask: jax.Array) -> jax.Array:
  total = jnp.sum(difference, axis=1, keepdims=True)
  return keep(jnp.broadcast_to(total, mask.shape), mask)


# Level -> (differences d [B, T], 0 outside the mask; mask) -> log-ratios [B, T].
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
  """Returns -min(w A, clip(w, 1 - clip_low, 1 + clip_high) A): PPO (arXiv:1707.06347).

  If A >= 0, w is bounded from above by 1 + clip_high. If A < 0, w is bounded from below
  by 1 - clip_low. With clip_high > clip_low this is the clip-higher of DAPO
  (arXiv:2503.14476). `safe_exp` bounds w by exp(20), so that the loss stays finite.

  Args:
    log_ratio: log w of each token.
    advantages: A, [B] or [B, T].
    clip_low: distance of the lower bound from 1, in [0, 1].
    clip_high: distance of the upper bound from 1, >= 0.
    dual_clip: upper bound of w if A < 0 (arXiv:1912.09729; usually 3). It must be above
      1 + clip_high. None for no bound.

  Raises:
    ValueError: a bound is out of range.
  """
  _check_clip(clip_low, clip_high)
  if dual_clip is not None and dual_clip <= 1 + clip_high:
    raise ValueError(
      f"dual_clip={dual_clip} must be above 1 + clip_high={1 + clip_high}: it bounds "
      "the ratio of tokens with negative advantage"
    )
  ratio, advantages = safe_exp(log_ratio), _per_token(advantages)
  upper = jnp.inf if dual_clip is None else dual_clip
  good = advantages >= 0
  # The minimum of the two products keeps the smaller ratio if A >= 0 and the larger one
  # if A < 0, so each sign of A has one bound.
  counted = jnp.where(
    good, jnp.minimum(ratio, 1 + clip_high), jnp.clip(ratio, 1 - clip_low, upper)
  )
  too_low, too_high = ratio < 1 - clip_low, ratio > 1 + clip_high
  clipped = jnp.where(good, too_high, too_low | (ratio > upper))
  # A token with advantage 0 has no gradient that the clip could remove.
  return PolicyLoss(-counted * advantages, clipped & (advantages != 0))


def cispo_loss(
  log_ratio: Float[Array, "B T"],
  logps: Float[Array, "B T"],
  advantages: Advantages,
  *,
  clip_low: float = 1.0,
  clip_high: float = 4.0,
) -> PolicyLoss:
  """Returns -stop_gradient(clip(w, 1 - clip_low, 1 + clip_high)) A logps: CISPO.

  See arXiv:2506.13585. The weight w is bounded, but every token keeps the gradient of
  its log-probability, while `clipped_loss` removes it. Bounds are distances from 1 as
  in `clipped_loss`: the defaults keep w in [0, 5].

  Args:
    log_ratio: log w of each token.
    logps: log-probabilities under the trained policy, differentiated.
    advantages: A, [B] or [B, T].
    clip_low: distance of the lower bound from 1, in [0, 1]; 1 for no lower bound.
    clip_high: distance of the upper bound from 1, >= 0.

  Raises:
    ValueError: a bound is out of range.
  """
  _check_clip(clip_low, clip_high)
  ratio = safe_exp(log_ratio)
  weight = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
  # `reinforce_loss` stops the gradient of advantages, and so that of the weight.
  values = reinforce_loss(logps, weight * _per_token(advantages))
  return PolicyLoss(values, weight != ratio)


def sapo_loss(
  log_ratio: Float[Array, "B T"],
  advantages: Advantages,
  *,
  positive: float = 1.0,
  negative: float = 1.05,
) -> PolicyLoss:
  """Returns -(4 / tau) sigmoid(tau (w - 1)) A: SAPO (arXiv:2511.20347).

  The gate replaces the clip: the gradient of a token is that of w A at w = 1, and
  shrinks smoothly as w moves away from 1 on either side. tau is `positive` if A > 0,
  and else `negative`; a larger tau shrinks faster. No ratio is replaced, so `clipped`
  is False everywhere.

  Args:
    log_ratio: log w of each token.
    advantages: A, [B] or [B, T].
    positive, negative: temperatures, > 0.

  Raises:
    ValueError: a temperature is not above 0.
  """
  if min(positive, negative) <= 0:
    raise ValueError(
      f"positive={positive} and negative={negative} are temperatures of the gate; "
      "expected both above 0"
    )
  ratio, advantages = safe_exp(log_ratio), _per_token(advantages)
  tau = jnp.where(advantages > 0, positive, negative)
  values = -4 / tau * jax.nn.sigmoid(tau * (ratio - 1)) * advantages
  return PolicyLoss(values, jnp.zeros(values.shape, bool))


def dppo_loss(
  logps: Float[Array, "B T"],
  rollout_logps: Float[Array, "B T"],
  advantages: Advantages,
  mask: Shaped[Array, "B T"],
  *,
  divergence: str = "tv",
  limit: float = 0.15,
) -> PolicyLoss:
  """Returns -M u A with u = pi / mu: DPPO (arXiv:2602.04879, equations 11 to 14).

  mu is the policy that sampled, not the trainer's at the start of the update. M is 0,
  so that the token has no gradient, if the update would move the token's probability
  further away from mu (A > 0 and u > 1, or A < 0 and u < 1) and the divergence is above
  the limit. Otherwise M is 1. The divergence is that of two outcomes, the sampled token
  with probability p under mu and q under pi, and any other token:

    tv    |p - q|
    kl    p log(p / q) + (1 - p) log((1 - p) / (1 - q))

  Both are at most the divergence over the whole vocabulary. The authors' scripts have
  limits of 0.15 (tv) and 0.05 (kl).

  Args:
    logps: log-probabilities under the trained policy, differentiated.
    rollout_logps: log-probabilities under the policy that sampled, in nats.
    advantages: A, [B] or [B, T].
    mask: 1 on completion tokens; the loss is 0 elsewhere.
    divergence: a name from `DIVERGENCES`.
    limit: largest divergence, > 0.

  Returns:
    The losses, and True for tokens whose M is 0.

  Raises:
    ValueError: the divergence is unknown, or limit <= 0.
  """
  if divergence not in DIVERGENCES:
    raise ValueError(
      f"unknown divergence {divergence!r}: use one of {list(DIVERGENCES)}"
    )
  if limit <= 0:
    raise ValueError(f"limit={limit} is the largest divergence; expected above 0")
  rollout_logps = jax.lax.stop_gradient(keep(rollout_logps, mask))
  advantages = _per_token(advantages)
  logs = log_ratio(logps, rollout_logps, mask)
  trained = jax.lax.stop_gradient(keep(logps, mask))
  moves_away = advantages * jax.lax.stop_gradient(logs) > 0
  dropped = moves_away & (DIVERGENCES[divergence](rollout_logps, trained) > limit)
  ratio = keep(safe_exp(logs), mask)
  return PolicyLoss(-jnp.where(dropped, 0.0, ratio) * advantages, dropped)


def _binary_tv(rollout_logps: jax.Array, logps: jax.Array) -> jax.Array:
  return jnp.abs(jnp.exp(rollout_logps) - jnp.exp(logps))


def _binary_kl(rollout_logps: jax.Array, logps: jax.Array) -> jax.Array:
  # log(1 - p) of a p that rounds to 1 is -inf. The smallest positive 1 - p in float32
  # stands for it, so that the divergence is large and finite.
  def other(x):
    return jnp.log(jnp.maximum(-jnp.expm1(x), 2.0**-24))

  p = jnp.exp(rollout_logps)
  same = p * (rollout_logps - logps)
  return same + (1 - p) * (other(rollout_logps) - other(logps))


# Name -> (log-probabilities under the sampling policy, and under the trained one) ->
# divergence of each token, in nats for "kl".
DIVERGENCES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
  "tv": _binary_tv,
  "kl": _binary_kl,
}


def reinforce_loss(
  logps: Float[Array, "B T"], advantages: Advantages
) -> Float[Array, "B T"]:
  """Returns -A logps: REINFORCE (Williams 1992), for samples of the trained policy."""
  return -_per_token(advantages) * logps


def centering_loss(
  head_logps: Float[Array, "B T k"],
  head_probs: Float[Array, "B T k"],
  advantages: Advantages,
  weight: Callable[[jax.Array], jax.Array] = jnp.ones_like,
) -> Float[Array, "B T"]:
  """Returns A sum_v stop(c_v) log p_v: score centering (arXiv:2609.20807).

  Added to a loss whose gradient is -A f(p / q) grad log p of a token drawn from q, it
  subtracts the mean of f(p / q) grad log p over q. The gradient is then 0 in
  expectation if the advantages have nothing to do with the tokens, although p and q
  differ. The sum is over the head H, the recorded tokens. The other tokens are taken to
  have q = rho p, with rho = (1 - sum_H q) / (1 - sum_H p):

    c_v = q_v f(p_v / q_v) - rho f(1 / rho) p_v

  The second term is that of the other tokens, because the mean of grad log p over p is
  0. If H has all tokens that q can draw, the result is exact.

  Args:
    head_logps: log p of the tokens in H under the trained policy, differentiated.
    head_probs: q of the tokens in H; 0 for none. If all are 0, the result is 0.
    advantages: A, [B] or [B, T].
    weight: f, from ratios of any shape; 1 by default.
  """
  q = jax.lax.stop_gradient(head_probs)
  logps = keep(head_logps, q)
  p = keep(jnp.exp(jax.lax.stop_gradient(logps)), q)

  def left(x, least):
    return jnp.maximum(1 - jnp.sum(x, -1, keepdims=True), least)

  # If the head has all tokens, both rests are rounding errors, and rho has no effect:
  # the sum of p grad log p over the head is 0.
  rho = left(q, 0.0) / left(p, 1e-6)
  rest = rho * weight(safe_divide(jnp.ones_like(rho), rho))
  coefficients = q * weight(safe_divide(p, q)) - rest * p
  return _per_token(advantages) * jnp.sum(coefficients * logps, axis=-1)


def value_loss(
  values: Float[Array, "B T"],
  returns: Float[Array, "B T"],
  old_values: Float[Array, "B T"] | None = None,
  clip: float | None = None,
) -> PolicyLoss:
  """Returns (V - R)^2 / 2, or with a clip the larger of this and the clipped loss.

  The clipped loss is (V' - R)^2 / 2, where V' is V clipped to within +-clip of
  `old_values`, so that one batch cannot move the critic far. PPO's reference
  implementation has the same form.

  Args:
    values: V, the critic's estimates, differentiated.
    returns: R, the targets, from `advantages.gae`.
    old_values: estimates that the returns were computed from; None without a clip.
    clip: bound in units of reward, > 0; None without a clip.

  Raises:
    ValueError: only one of `old_values` and `clip` is given, or clip <= 0.
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
  # If the clipped loss is larger, V was outside the bounds, and its gradient is 0.
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
