"""Losses of preference pairs, each computed from one pair alone; to be minimized.

Each function takes `PairScores` and returns a value per pair. Let x be the prompt, c
the chosen and r the rejected response, pi the policy and pi_0 the reference. In natural
logarithms, summed over tokens:

  C = log pi(c|x) - log pi_0(c|x)      R = log pi(r|x) - log pi_0(r|x)      D = C - R

|c| and |r| are numbers of tokens, and s is the logistic function. Call these losses
through `preference.pair_loss`, which finds them by name (`preference.PAIR_LOSSES`),
checks the options and removes padding. Losses that need all pairs of the batch are in
`pair_losses_coupled`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tunix.ops.reductions import keep, safe_exp
from tunix.utils.metric import SAME, Metric

# Upper bound of mean log-probabilities in ORPO, because probability 1 has infinite
# odds. At the bound log(1 - P) is log(1 - exp(-1e-6)) = -13.8.
MAX_MEAN_LOGP = -1e-6


METRICS = (
  Metric(
    "sft_loss",
    "nats",
    "negative log-probability of the chosen completion: summed over its tokens in "
    "`cpo`, their mean in `orpo`",
    condition="with the losses `cpo` and `orpo`",
  ),
  Metric(
    "or_loss", "nats", "odds term without its weight", condition="with the loss `orpo`"
  ),
  Metric(
    "odds_ratio",
    "nats",
    "difference of the log-odds of chosen and rejected",
    condition="with the loss `orpo`",
    known_as=SAME,
  ),
)


class PairScores(NamedTuple):
  """The input of a pair loss, float32 [B] each.

  Attributes:
    chosen, rejected: log-probabilities of the responses under the policy, summed over
      tokens, in nats; differentiated.
    ref_chosen, ref_rejected: the same under the reference; 0 without a reference.
    chosen_tokens, rejected_tokens: lengths of the responses, in tokens.
    weights: 1 for a pair, 0 for a row of padding.
  """

  chosen: jax.Array
  rejected: jax.Array
  ref_chosen: jax.Array
  ref_rejected: jax.Array
  chosen_tokens: jax.Array
  rejected_tokens: jax.Array
  weights: jax.Array


class PairLoss(NamedTuple):
  """Losses and metrics of pairs.

  Attributes:
    values: losses, float32 [B], differentiable.
    metrics: float32 [B] each, without gradient; average them with the weights of the
      pairs.
  """

  values: jax.Array
  metrics: dict[str, jax.Array]


def masked(
  values: jax.Array, metrics: dict[str, jax.Array], weights: jax.Array
) -> PairLoss:
  """Returns a PairLoss that is 0 where the weight is 0; metrics have no gradient."""
  kept = {name: keep(x, weights) for name, x in metrics.items()}
  return PairLoss(keep(values, weights), jax.lax.stop_gradient(kept))


def log_ratios(scores: PairScores) -> tuple[jax.Array, jax.Array]:
  """Returns (C, R) of the pairs, [B] each."""
  return scores.chosen - scores.ref_chosen, scores.rejected - scores.ref_rejected


def mean_log_ratios(scores: PairScores) -> tuple[jax.Array, jax.Array]:
  """Returns (C / |c|, R / |r|) of the pairs, [B] each: means per token."""
  chosen, rejected = log_ratios(scores)
  return chosen / scores.chosen_tokens, rejected / scores.rejected_tokens


def smoothed_logistic(
  logits: Float[Array, " B"], label_smoothing: float
) -> Float[Array, " B"]:
  """Returns -(1 - e) log s(z) - e log s(-z), where e is `label_smoothing`.

  Args:
    logits: z of each pair.
    label_smoothing: probability e that chosen and rejected are swapped by mistake.

  Raises:
    ValueError: e is not in [0, 0.5).
  """
  check_smoothing(label_smoothing)
  right, flipped = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
  return -(1 - label_smoothing) * right - label_smoothing * flipped


def check_smoothing(label_smoothing: float) -> None:
  """Refuses an invalid share of wrong labels.

  Raises:
    ValueError: the share is not in [0, 0.5).
  """
  if not 0 <= label_smoothing < 0.5:
    raise ValueError(
      f"label_smoothing={label_smoothing}; expected a probability in [0, 0.5) that "
      "chosen and rejected are swapped. At 0.5 the loss has no gradient"
    )


def sigmoid(
  scores: PairScores, *, beta: float, label_smoothing: float = 0.0
) -> Float[Array, " B"]:
  """Returns -log s(beta D): DPO (arXiv:2305.18290, equation 7).

  With `label_smoothing` e it is cDPO (https://ericmitchell.ai/cdpo.pdf):
  -(1 - e) log s(beta D) - e log s(-beta D).
  """
  chosen, rejected = log_ratios(scores)
  return smoothed_logistic(beta * (chosen - rejected), label_smoothing)


def hinge(scores: PairScores, *, beta: float) -> Float[Array, " B"]:
  """Returns max(0, 1 - beta D): SLiC with log-ratios.

  SLiC is arXiv:2305.10425; RSO (arXiv:2309.06657) introduced the log-ratios.
  """
  chosen, rejected = log_ratios(scores)
  return jax.nn.relu(1 - beta * (chosen - rejected))


def ipo(scores: PairScores, *, beta: float, average: bool = True) -> Float[Array, " B"]:
  """Returns (C / |c| - R / |r| - 1 / (2 beta))^2: IPO (arXiv:2310.12036, equation 17).

  Beta is the paper's tau. The paper's formula has the sums C - R (`average=False`).
  According to TRL, its authors used means per token, with which the target 1 / (2 beta)
  has the same meaning for responses of all lengths.
  """
  chosen, rejected = (mean_log_ratios if average else log_ratios)(scores)
  return jnp.square(chosen - rejected - 1 / (2 * beta))


def exo_pair(
  scores: PairScores, *, beta: float, label_smoothing: float = 0.0
) -> Float[Array, " B"]:
  """Returns KL(p || q) for p = (s(beta D), s(-beta D)), q = (1 - e, e): EXO for pairs.

  See arXiv:2402.00856, equation 16; e is `label_smoothing`.

  Raises:
    ValueError: e is not in (0, 0.5); at 0 the divergence is infinite.
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
  """Returns -log s(beta C) - log s(-beta C) / 2 - log s(-beta R) / 2: NCA for pairs.

  See arXiv:2402.05369.
  """
  chosen, rejected = log_ratios(scores)
  lost = jax.nn.log_sigmoid(-beta * chosen) + jax.nn.log_sigmoid(-beta * rejected)
  return -jax.nn.log_sigmoid(beta * chosen) - lost / 2


def robust(
  scores: PairScores, *, beta: float, label_smoothing: float = 0.0
) -> Float[Array, " B"]:
  """Returns (-(1 - e) log s(beta D) + e log s(-beta D)) / (1 - 2 e): robust DPO.

  See arXiv:2403.00409; e is `label_smoothing`. If labels are flipped with probability
  e, its expectation is the DPO loss of the correct labels. As in the paper it has no
  lower bound: it decreases without end as D grows.
  """
  check_smoothing(label_smoothing)
  chosen, rejected = log_ratios(scores)
  logits = beta * (chosen - rejected)
  clean = (1 - label_smoothing) * -jax.nn.log_sigmoid(logits)
  flipped = label_smoothing * -jax.nn.log_sigmoid(-logits)
  return (clean - flipped) / (1 - 2 * label_smoothing)


def sppo_hard(scores: PairScores, *, beta: float) -> Float[Array, " B"]:
  """Returns (C - 1 / (2 beta))^2 + (R + 1 / (2 beta))^2: SPPO.

  See arXiv:2405.00675, equation 4.7, with a probability of winning of 1 for the chosen
  and 0 for the rejected response. 1 / beta is the paper's eta.
  """
  chosen, rejected = log_ratios(scores)
  return jnp.square(chosen - 0.5 / beta) + jnp.square(rejected + 0.5 / beta)


def apo_zero(scores: PairScores, *, beta: float) -> Float[Array, " B"]:
  """Returns (1 - s(beta C)) + s(beta R): APO-zero (arXiv:2408.06266, equation 7).

  Use it if the chosen responses are better than those of the model.
  """
  chosen, rejected = log_ratios(scores)
  return jax.nn.sigmoid(-beta * chosen) + jax.nn.sigmoid(beta * rejected)


def apo_down(scores: PairScores, *, beta: float) -> Float[Array, " B"]:
  """Returns s(beta C) + (1 - s(beta D)): APO-down (arXiv:2408.06266, equation 8).

  Use it if the chosen responses are worse than those of the model.
  """
  chosen, rejected = log_ratios(scores)
  return jax.nn.sigmoid(beta * chosen) + jax.nn.sigmoid(-beta * (chosen - rejected))


def discopop(
  scores: PairScores, *, beta: float, tau: float = 0.05
) -> Float[Array, " B"]:
  """Returns -(1 - m) log s(z) + m exp(-z) with z = beta D and m = s(z / tau).

  It is the discovered log-ratio modulated loss, DiscoPOP (arXiv:2406.08414, equation
  5).

  Raises:
    ValueError: tau <= 0.
  """
  if tau <= 0:
    raise ValueError(f"tau={tau} must be positive: it is a temperature; 0.05 is usual")
  chosen, rejected = log_ratios(scores)
  logits = beta * (chosen - rejected)
  logistic = jax.nn.sigmoid(-logits / tau) * -jax.nn.log_sigmoid(logits)
  # m exp(-z) is computed as exp(log m - z). For very negative z, m is 0 and exp(-z)
  # infinite, and their product would be NaN.
  return logistic + safe_exp(jax.nn.log_sigmoid(logits / tau) - logits)


def sigmoid_norm(
  scores: PairScores, *, beta: float, label_smoothing: float = 0.0
) -> Float[Array, " B"]:
  """Returns -log s(beta (C / |c| - R / |r|)): length-normalized DPO.

  See Tulu 3, arXiv:2411.15124; `label_smoothing` is as for `sigmoid`.
  """
  chosen, rejected = mean_log_ratios(scores)
  return smoothed_logistic(beta * (chosen - rejected), label_smoothing)


def simpo(
  scores: PairScores,
  *,
  beta: float,
  gamma: float = 0.5,
  label_smoothing: float = 0.0,
) -> Float[Array, " B"]:
  """Returns -log s(beta log pi(c) / |c| - beta log pi(r) / |r| - gamma): SimPO.

  See arXiv:2405.14734, equation 6; it needs no reference. The paper's beta is 2 to 2.5,
  far above that of DPO. `gamma` >= 0 is in units of reward, 0.3 to 1.6 in the paper.
  `label_smoothing` is as for `sigmoid`.

  Raises:
    ValueError: gamma < 0.
  """
  if gamma < 0:
    raise ValueError(f"gamma={gamma} must be >= 0: it is the required margin")
  chosen, rejected = _mean_logps(scores)
  return smoothed_logistic(beta * (chosen - rejected) - gamma, label_smoothing)


def cpo(
  scores: PairScores,
  *,
  beta: float,
  cpo_alpha: float = 1.0,
  label_smoothing: float = 0.0,
) -> PairLoss:
  """Returns -log s(beta (log pi(c) - log pi(r))) - cpo_alpha log pi(c) / |c|: CPO.

  See arXiv:2401.08417; it needs no reference. The metric `sft_loss` is the second term
  without its factor, a mean over the tokens of a response. `label_smoothing` is as for
  `sigmoid`.

  Raises:
    ValueError: cpo_alpha < 0.
  """
  if cpo_alpha < 0:
    raise ValueError(f"cpo_alpha={cpo_alpha} must be >= 0: it is a weight")
  preferred = smoothed_logistic(
    beta * (scores.chosen - scores.rejected), label_smoothing
  )
  likelihood = -scores.chosen / scores.chosen_tokens
  return PairLoss(preferred + cpo_alpha * likelihood, {"sft_loss": likelihood})


def orpo(scores: PairScores, *, lambda_orpo: float = 0.1) -> PairLoss:
  """Returns -log P(c) - lambda_orpo log s(log odds(c) - log odds(r)): ORPO.

  See arXiv:2403.07691, equations 3 to 7; it needs no reference. log P is the mean
  log-probability per token, and odds = P / (1 - P). The metric `sft_loss` is the first
  term, `or_loss` the second without its weight, and `odds_ratio` the difference of the
  log odds. Mean log-probabilities above -1e-6 count as -1e-6, and 1 - P has no gradient
  there.

  Raises:
    ValueError: lambda_orpo <= 0.
  """
  if lambda_orpo <= 0:
    raise ValueError(
      f"lambda_orpo={lambda_orpo} must be positive: without the odds ratio the loss is "
      "that of fine-tuning"
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
  """Returns log(1 - exp(x)) for x < 0, by two formulas that meet at -log 2."""
  # For x near 0, 1 - exp(x) loses digits by cancellation, and expm1 does not. For x far
  # below 0, exp(x) is small, and log1p keeps its digits.
  x = jnp.minimum(logps, MAX_MEAN_LOGP)
  likely = x > -math.log(2)
  # Both formulas are computed. The one that is not used gets x = -1, so that its
  # gradient is finite.
  near = jnp.log(-jnp.expm1(jnp.where(likely, x, -1.0)))
  far = jnp.log1p(-jnp.exp(jnp.where(likely, -1.0, x)))
  return jnp.where(likely, near, far)
