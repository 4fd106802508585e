"""Losses of a pair of responses that look at no other pair; to be minimised.

Each takes `PairScores` and gives a value per pair. With x the prompt, c the chosen and
r the rejected response, pi the policy and pi_0 the reference, in natural logarithms:

  C = log pi(c|x) - log pi_0(c|x)      R = log pi(r|x) - log pi_0(r|x)

summed over tokens; D = C - R. s is the logistic function. `preference.PAIR_LOSSES` has
the names and `preference.pair_loss` is the way to call them: it checks options and
keeps padding out. Losses that look at all pairs are in `pair_losses_coupled`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tunix.ops.reductions import keep, safe_exp

# Mean log-probabilities above this count as this in ORPO: the odds of probability 1 are
# infinite. log(1 - exp(-1e-6)) is -13.8.
MAX_MEAN_LOGP = -1e-6


class PairScores(NamedTuple):
  """What a pair loss knows, float32 [B] each.

  Attributes:
    chosen, rejected: log-probabilities of the responses under the policy, summed over
      tokens, in nats; differentiated.
    ref_chosen, ref_rejected: likewise under the reference; 0 where there is none.
    chosen_tokens, rejected_tokens: lengths of the responses.
    weights: 1 for a pair, 0 for a row that only fills the batch up.
  """

  chosen: jax.Array
  rejected: jax.Array
  ref_chosen: jax.Array
  ref_rejected: jax.Array
  chosen_tokens: jax.Array
  rejected_tokens: jax.Array
  weights: jax.Array


class PairLoss(NamedTuple):
  """A loss per pair.

  Attributes:
    values: float32 [B], differentiable.
    metrics: float32 [B] each, constants; average them with the pairs' weights.
  """

  values: jax.Array
  metrics: dict[str, jax.Array]


def masked(
  values: jax.Array, metrics: dict[str, jax.Array], weights: jax.Array
) -> PairLoss:
  """PairLoss with 0 where the weight is 0 and no gradient through the metrics."""
  kept = {name: keep(x, weights) for name, x in metrics.items()}
  return PairLoss(keep(values, weights), jax.lax.stop_gradient(kept))


def log_ratios(scores: PairScores) -> tuple[jax.Array, jax.Array]:
  """(C, R) of the pairs, [B] each."""
  return scores.chosen - scores.ref_chosen, scores.rejected - scores.ref_rejected


def mean_log_ratios(scores: PairScores) -> tuple[jax.Array, jax.Array]:
  """(C / |c|, R / |r|) of the pairs, [B] each: per token."""
  chosen, rejected = log_ratios(scores)
  return chosen / scores.chosen_tokens, rejected / scores.rejected_tokens


def smoothed_logistic(
  logits: Float[Array, " B"], label_smoothing: float
) -> Float[Array, " B"]:
  """-(1 - e) log s(z) - e log s(-z), with e the probability that a label is wrong.

  Raises:
    ValueError: e outside [0, 0.5).
  """
  check_smoothing(label_smoothing)
  keep, flip = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
  return -(1 - label_smoothing) * keep - label_smoothing * flip


def check_smoothing(label_smoothing: float) -> None:
  """Refuses what cannot be the share of wrong labels.

  Raises:
    ValueError: not in [0, 0.5).
  """
  if not 0 <= label_smoothing < 0.5:
    raise ValueError(
      f"label_smoothing={label_smoothing} must be in [0, 0.5): it is the probability "
      "that a pair is the wrong way round, and at 0.5 nothing can be learnt"
    )


def sigmoid(
  scores: PairScores, *, beta: float, label_smoothing: float = 0.0
) -> Float[Array, " B"]:
  """-log s(beta D): DPO (arXiv:2305.18290, equation 7).

  With `label_smoothing` e it is cDPO (https://ericmitchell.ai/cdpo.pdf):
  -(1 - e) log s(beta D) - e log s(-beta D).
  """
  chosen, rejected = log_ratios(scores)
  return smoothed_logistic(beta * (chosen - rejected), label_smoothing)


def hinge(scores: PairScores, *, beta: float) -> Float[Array, " B"]:
  """max(0, 1 - beta D): SLiC (arXiv:2305.10425) with log-ratios, as in RSO
  (arXiv:2309.06657)."""
  chosen, rejected = log_ratios(scores)
  return jax.nn.relu(1 - beta * (chosen - rejected))


def ipo(scores: PairScores, *, beta: float, average: bool = True) -> Float[Array, " B"]:
  """(C / |c| - R / |r| - 1 / (2 beta))^2: IPO (arXiv:2310.12036, equation 17).

  Beta is the paper's tau. The paper's formula has the sums C - R (`average=False`); the
  means per token are what its authors ran, as TRL reports, and what makes the target
  1 / (2 beta) mean the same for responses of all lengths.
  """
  chosen, rejected = (mean_log_ratios if average else log_ratios)(scores)
  return jnp.square(chosen - rejected - 1 / (2 * beta))


def exo_pair(
  scores: PairScores, *, beta: float, label_smoothing: float = 0.0
) -> Float[Array, " B"]:
  """KL(p || q) of p = (s(beta D), s(-beta D)) from q = (1 - e, e): EXO for pairs
  (arXiv:2402.00856, equation 16).

  Raises:
    ValueError: `label_smoothing` not in (0, 0.5): at 0 the divergence is infinite.
  """
  if not 0 < label_smoothing < 0.5:
    raise ValueError(
      f"label_smoothing={label_smoothing} must be in (0, 0.5) for exo_pair: it is "
      "the divergence from (1 - label_smoothing, label_smoothing); 1e-3 is usual"
    )
  chosen, rejected = log_ratios(scores)
  logits = beta * (chosen - rejected)
  won = jax.nn.log_sigmoid(logits) - math.log1p(-label_smoothing)
  lost = jax.nn.log_sigmoid(-logits) - math.log(label_smoothing)
  return jax.nn.sigmoid(logits) * won + jax.nn.sigmoid(-logits) * lost


def nca_pair(scores: PairScores, *, beta: float) -> Float[Array, " B"]:
  """-log s(beta C) - log s(-beta C) / 2 - log s(-beta R) / 2: NCA for pairs
  (arXiv:2402.05369)."""
  chosen, rejected = log_ratios(scores)
  lost = jax.nn.log_sigmoid(-beta * chosen) + jax.nn.log_sigmoid(-beta * rejected)
  return -jax.nn.log_sigmoid(beta * chosen) - lost / 2


def robust(
  scores: PairScores, *, beta: float, label_smoothing: float = 0.0
) -> Float[Array, " B"]:
  """(-(1 - e) log s(beta D) + e log s(-beta D)) / (1 - 2 e): robust DPO
  (arXiv:2403.00409).

  In expectation over labels flipped with probability e it is DPO on the clean ones.
  Like the paper's it has no lower bound: it falls for ever with D.
  """
  check_smoothing(label_smoothing)
  chosen, rejected = log_ratios(scores)
  logits = beta * (chosen - rejected)
  clean = (1 - label_smoothing) * -jax.nn.log_sigmoid(logits)
  flipped = label_smoothing * -jax.nn.log_sigmoid(-logits)
  return (clean - flipped) / (1 - 2 * label_smoothing)


def sppo_hard(scores: PairScores, *, beta: float) -> Float[Array, " B"]:
  """(C - 1 / (2 beta))^2 + (R + 1 / (2 beta))^2: SPPO (arXiv:2405.00675, equation 4.7)
  with the probability of winning 1 for chosen and 0 for rejected; 1 / beta is the
  paper's eta."""
  chosen, rejected = log_ratios(scores)
  return jnp.square(chosen - 0.5 / beta) + jnp.square(rejected + 0.5 / beta)


def apo_zero(scores: PairScores, *, beta: float) -> Float[Array, " B"]:
  """(1 - s(beta C)) + s(beta R): APO-zero (arXiv:2408.06266, equation 7), for chosen
  responses that are better than the model."""
  chosen, rejected = log_ratios(scores)
  return jax.nn.sigmoid(-beta * chosen) + jax.nn.sigmoid(beta * rejected)


def apo_down(scores: PairScores, *, beta: float) -> Float[Array, " B"]:
  """s(beta C) + (1 - s(beta D)): APO-down (arXiv:2408.06266, equation 8), for chosen
  responses that are worse than the model."""
  chosen, rejected = log_ratios(scores)
  return jax.nn.sigmoid(beta * chosen) + jax.nn.sigmoid(-beta * (chosen - rejected))


def discopop(
  scores: PairScores, *, beta: float, tau: float = 0.05
) -> Float[Array, " B"]:
  """-(1 - m) log s(z) + m exp(-z) with z = beta D and m = s(z / tau): the discovered
  log-ratio modulated loss (arXiv:2406.08414, equation 5).

  Raises:
    ValueError: tau <= 0.
  """
  if tau <= 0:
    raise ValueError(f"tau={tau} must be positive: it is a temperature; 0.05 is usual")
  chosen, rejected = log_ratios(scores)
  logits = beta * (chosen - rejected)
  logistic = jax.nn.sigmoid(-logits / tau) * -jax.nn.log_sigmoid(logits)
  # m exp(-z) in one exponential: alone exp(-z) is infinite where m is 0.
  return logistic + safe_exp(jax.nn.log_sigmoid(logits / tau) - logits)


def sigmoid_norm(
  scores: PairScores, *, beta: float, label_smoothing: float = 0.0
) -> Float[Array, " B"]:
  """-log s(beta (C / |c| - R / |r|)): length-normalised DPO (Tulu 3,
  arXiv:2411.15124); `label_smoothing` as for `sigmoid`."""
  chosen, rejected = mean_log_ratios(scores)
  return smoothed_logistic(beta * (chosen - rejected), label_smoothing)


def simpo(
  scores: PairScores,
  *,
  beta: float,
  gamma: float = 0.5,
  label_smoothing: float = 0.0,
) -> Float[Array, " B"]:
  """-log s(beta log pi(c) / |c| - beta log pi(r) / |r| - gamma): SimPO
  (arXiv:2405.14734, equation 6), without a reference.

  The paper's beta is 2 to 2.5, far above DPO's; `gamma` >= 0 is in units of reward, 0.3
  to 1.6 there. `label_smoothing` as for `sigmoid`.

  Raises:
    ValueError: gamma < 0.
  """
  if gamma < 0:
    raise ValueError(f"gamma={gamma} must be >= 0: it is the margin that is asked for")
  chosen, rejected = _mean_logps(scores)
  return smoothed_logistic(beta * (chosen - rejected) - gamma, label_smoothing)


def cpo(
  scores: PairScores,
  *,
  beta: float,
  cpo_alpha: float = 1.0,
  label_smoothing: float = 0.0,
) -> PairLoss:
  """-log s(beta (log pi(c) - log pi(r))) - cpo_alpha log pi(c) / |c|: CPO
  (arXiv:2401.08417), without a reference.

  The likelihood term is the mean over a response's tokens, then over pairs; metric
  `sft_loss` has it. `label_smoothing` as for `sigmoid`.

  Raises:
    ValueError: cpo_alpha < 0.
  """
  if cpo_alpha < 0:
    raise ValueError(f"cpo_alpha={cpo_alpha} must be >= 0: it weighs the likelihood")
  preferred = smoothed_logistic(
    beta * (scores.chosen - scores.rejected), label_smoothing
  )
  likelihood = -scores.chosen / scores.chosen_tokens
  return PairLoss(preferred + cpo_alpha * likelihood, {"sft_loss": likelihood})


def orpo(scores: PairScores, *, lambda_orpo: float = 0.1) -> PairLoss:
  """-log P(c) - lambda_orpo log s(log odds(c) - log odds(r)): ORPO (arXiv:2403.07691,
  equations 3 to 7), without a reference.

  log P is the mean log-probability per token and odds = P / (1 - P).
  Metrics: `sft_loss` the first term, `or_loss` the second without its weight,
  `odds_ratio` the difference of the log odds. Mean log-probabilities above -1e-6 count
  as -1e-6, where 1 - P has no gradient any more.

  Raises:
    ValueError: lambda_orpo <= 0.
  """
  if lambda_orpo <= 0:
    raise ValueError(
      f"lambda_orpo={lambda_orpo} must be positive: without the odds ratio the loss is "
      "that of supervised training"
    )
  chosen, rejected = _mean_logps(scores)
  odds = chosen - rejected - (_log1mexp(chosen) - _log1mexp(rejected))
  odds_loss = -jax.nn.log_sigmoid(odds)
  metrics = {"odds_ratio": odds, "sft_loss": -chosen, "or_loss": odds_loss}
  return PairLoss(-chosen + lambda_orpo * odds_loss, metrics)


def _mean_logps(scores: PairScores) -> tuple[jax.Array, jax.Array]:
  return (
    scores.chosen / scores.chosen_tokens,
    scores.rejected / scores.rejected_tokens,
  )


def _log1mexp(logps: jax.Array) -> jax.Array:
  """log(1 - exp(x)) for x < 0: each half where it keeps its digits."""
  x = jnp.minimum(logps, MAX_MEAN_LOGP)
  likely = x > -math.log(2)
  # The half that is not used sees -1, so that its gradient is finite.
  near = jnp.log(-jnp.expm1(jnp.where(likely, x, -1.0)))
  far = jnp.log1p(-jnp.exp(jnp.where(likely, -1.0, x)))
  return jnp.where(likely, near, far)
