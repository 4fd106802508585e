"""Losses of preference pairs by name, with metrics.

  scores = PairScores(chosen, rejected, ref_chosen, ref_rejected, ..., weights)
  loss = pair_loss("sigmoid", scores, beta=0.1)
  weighted_sum(loss.values, scores.weights)

`PAIR_LOSSES` has the names. Formulas and papers are in `pair_losses` and
`pair_losses_coupled`. KTO, a loss of single responses, is in `kto`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tunix.ops import kl, pair_losses as pairs, pair_losses_coupled as coupled
from tunix.ops.pair_losses import PairLoss, PairScores, masked
from tunix.ops.reductions import keep, safe_divide, weighted_sum
from tunix.utils.metric import SAME, Metric

METRICS = (
  Metric(
    "rewards/chosen",
    "nats",
    "beta (log pi - log pi_0) of the chosen completion",
    known_as=SAME,
  ),
  Metric(
    "rewards/rejected",
    "nats",
    "beta (log pi - log pi_0) of the rejected completion",
    known_as=SAME,
  ),
  Metric("rewards/margin", "nats", "rewards/chosen - rewards/rejected", known_as=SAME),
  Metric(
    "rewards/accuracy",
    "share",
    "pairs with a positive margin; a margin of 0 counts half",
    known_as=SAME,
  ),
  Metric(
    "log_probs/chosen",
    "nats",
    "log-probability of the chosen completion, summed over its tokens",
    known_as=SAME,
  ),
  Metric(
    "log_probs/rejected",
    "nats",
    "log-probability of the rejected completion, summed over its tokens",
    known_as=SAME,
  ),
  Metric(
    "kl",
    "nats^2",
    "(log pi - log pi_0)^2 / 2 of a completion, mean of chosen and rejected",
    condition="if the loss has a reference model",
  ),
)


class PairLossSpec(NamedTuple):
  """A pair loss with the properties that a trainer must know.

  Attributes:
    function: (PairScores, *, options) -> values [B], or a PairLoss with further
      metrics. The scores that it receives are 0 in rows of padding.
    needs_reference: True if the function reads ref_chosen and ref_rejected.
    coupled: True if the value of a pair depends on the other pairs. The loss then needs
      the global batch, or `coupled_coefficients` over micro-batches.
    averaged: True if its rewards, and those of the metrics, are means per token.
  """

  function: Callable[..., Any]
  needs_reference: bool = True
  coupled: bool = False
  averaged: bool = False

  @property
  def options(self) -> tuple[str, ...]:
    """Names of all options, including `beta` and `label_smoothing` if it takes them."""
    return tuple(inspect.signature(self.function).parameters)[1:]


PAIR_LOSSES: dict[str, PairLossSpec] = {
  "sigmoid": PairLossSpec(pairs.sigmoid),
  "hinge": PairLossSpec(pairs.hinge),
  "ipo": PairLossSpec(pairs.ipo, averaged=True),
  "exo_pair": PairLossSpec(pairs.exo_pair),
  "nca_pair": PairLossSpec(pairs.nca_pair),
  "robust": PairLossSpec(pairs.robust),
  "bco_pair": PairLossSpec(coupled.bco_pair, coupled=True),
  "sppo_hard": PairLossSpec(pairs.sppo_hard),
  "aot": PairLossSpec(coupled.aot, coupled=True),
  "aot_unpaired": PairLossSpec(coupled.aot_unpaired, coupled=True),
  "apo_zero": PairLossSpec(pairs.apo_zero),
  "apo_down": PairLossSpec(pairs.apo_down),
  "discopop": PairLossSpec(pairs.discopop),
  "sigmoid_norm": PairLossSpec(pairs.sigmoid_norm, averaged=True),
  "simpo": PairLossSpec(pairs.simpo, needs_reference=False, averaged=True),
  "cpo": PairLossSpec(pairs.cpo, needs_reference=False),
  "orpo": PairLossSpec(pairs.orpo, needs_reference=False, averaged=True),
}

Loss = str | PairLossSpec | Callable[..., Any]


class CoupledCoefficients(NamedTuple):
  """First-order approximation of a coupled loss; [B] each, without gradient.

  Attributes:
    values: losses of the pairs.
    chosen: derivative of sum(weights * values) in the chosen log-probabilities.
    rejected: derivative of sum(weights * values) in the rejected log-probabilities.
  """

  values: jax.Array
  chosen: jax.Array
  rejected: jax.Array


def pair_loss_spec(loss: Loss) -> PairLossSpec:
  """Returns the specification of a pair loss.

  Args:
    loss: a name of `PAIR_LOSSES`, a PairLossSpec, or a function. A function gets the
      defaults of PairLossSpec: it has a reference, is not coupled and sums over tokens.

  Raises:
    ValueError: the name is unknown.
    TypeError: `loss` is neither a name nor callable.
  """
  if isinstance(loss, PairLossSpec):
    return loss
  if callable(loss):
    return PairLossSpec(loss)
  if not isinstance(loss, str):
    raise TypeError(
      f"a pair loss is a name or a function, not {type(loss).__name__}: use one of "
      f"{list(PAIR_LOSSES)}, or f(scores, *, beta) -> values"
    )
  if loss not in PAIR_LOSSES:
    raise ValueError(f"unknown pair loss {loss!r}: use one of {list(PAIR_LOSSES)}")
  return PAIR_LOSSES[loss]


def pair_loss(
  loss: Loss,
  scores: PairScores,
  *,
  beta: float = 0.1,
  label_smoothing: float = 0.0,
  **options: object,
) -> PairLoss:
  """Returns the loss of every pair, and metrics.

  The metrics have no gradient. If the loss is `averaged`, rewards are means per token:

    rewards/chosen, rewards/rejected   beta (log pi - log pi_0)
    rewards/margin                     their difference
    rewards/accuracy                   1 if the margin is positive, 1/2 if it is 0, as
                                       before the first update (TRL counts this as 0)
    log_probs/chosen, log_probs/rejected   log-probabilities, summed over tokens
    kl                                 with a reference: k2, (log pi - log pi_0)^2 / 2,
                                       mean of both responses. It is near 0 if and only
                                       if the policy is near the reference; for samples
                                       of the policy it estimates the divergence

  cpo adds sft_loss, and orpo adds odds_ratio, sft_loss and or_loss.

  Args:
    loss: a name of `PAIR_LOSSES`, a PairLossSpec, or a function of scores and options.
    scores: scores of B pairs; a coupled loss needs the global batch. Rows of weight 0
      may have any values.
    beta: strength of the reference (an inverse temperature), > 0. In orpo it scales
      only the rewards of the metrics.
    label_smoothing: share of wrong labels; losses that do not take it accept 0 only.
    **options: further options of the loss.

  Returns:
    Values and metrics [B], 0 where the weight is 0.

  Raises:
    ValueError: the loss or an option is unknown, or an option is out of range.
  """
  spec = pair_loss_spec(loss)
  options = _checked(loss, spec, beta, label_smoothing, options)
  scores = _clean(scores)
  out = spec.function(scores, **options)
  values, extra = out if isinstance(out, PairLoss) else (out, {})
  return masked(values, {**_metrics(spec, scores, beta), **extra}, scores.weights)


def check_pair_loss(
  loss: Loss, *, beta: float = 0.1, label_smoothing: float = 0.0, **options: Any
) -> None:
  """Checks the options of a pair loss, before there are any scores.

  Raises:
    ValueError, TypeError: as for `pair_loss` and `pair_loss_spec`.
  """
  row: Any = jax.ShapeDtypeStruct((2,), jnp.float32)
  options = {"beta": beta, "label_smoothing": label_smoothing, **options}
  jax.eval_shape(lambda s: pair_loss(loss, s, **options), PairScores(*[row] * 7))


def coupled_coefficients(
  loss: Loss,
  scores: PairScores,
  *,
  beta: float = 0.1,
  label_smoothing: float = 0.0,
  **options: Any,
) -> CoupledCoefficients:
  """Computes the first of two passes of a coupled loss: its derivatives.

  The derivative of the loss in the log-probability of one pair depends on all pairs.
  This pass computes the derivatives from the scores of the global batch, which need no
  gradient. The second pass, `coupled_loss`, gives every micro-batch its exact part of
  the gradient.

  Args:
    loss, beta, label_smoothing, **options: as for `pair_loss`.
    scores: scores of the global batch.

  Raises:
    ValueError: as for `pair_loss`.
  """
  options = {"beta": beta, "label_smoothing": label_smoothing, **options}

  def total(chosen, rejected):
    differentiated = scores._replace(chosen=chosen, rejected=rejected)
    values = pair_loss(loss, differentiated, **options).values
    return weighted_sum(values, scores.weights).total, values

  gradient = jax.grad(total, (0, 1), has_aux=True)
  (chosen, rejected), values = gradient(scores.chosen, scores.rejected)
  return CoupledCoefficients(*jax.lax.stop_gradient((values, chosen, rejected)))


def coupled_loss(
  loss: Loss, coefficients: CoupledCoefficients, scores: PairScores, beta: float = 0.1
) -> PairLoss:
  """Computes the second pass: losses of a micro-batch with the global loss's gradient.

  Args:
    loss, beta: as for `coupled_coefficients`.
    coefficients: rows of this micro-batch.
    scores: scores of this micro-batch, differentiated.

  Returns:
    Values and metrics as from `pair_loss`; weight them with the weights of the pairs.
  """
  spec, scores = pair_loss_spec(loss), _clean(scores)

  # x - stop_gradient(x) is 0 with derivative 1: it adds gradients, not values.
  def change(x):
    return x - jax.lax.stop_gradient(x)

  slope = coefficients.chosen * change(scores.chosen)
  slope += coefficients.rejected * change(scores.rejected)
  values = coefficients.values + safe_divide(slope, scores.weights)
  return masked(values, _metrics(spec, scores, beta), scores.weights)


def accuracy(margins: jax.Array) -> jax.Array:
  """Returns 1 for a positive margin, 1/2 for 0 and 0 for a negative one."""
  return (jnp.sign(margins) + 1) / 2


def _checked(
  loss: Loss, spec: PairLossSpec, beta: float, label_smoothing: float, options: dict
) -> dict[str, Any]:
  """Returns the checked options of the function."""
  if not beta > 0:
    raise ValueError(f"beta={beta} must be positive; 0.1 is usual for DPO")
  name, names = loss if isinstance(loss, str) else "this function", spec.options
  if label_smoothing or "label_smoothing" in names:
    options = {"label_smoothing": label_smoothing, **options}
  unknown = [option for option in options if option not in names]
  if unknown:
    taken = [option for option in names if option != "beta"]
    raise ValueError(
      f"pair loss {name} takes no {', '.join(unknown)}: its options are {taken}"
    )
  return {"beta": beta, **options} if "beta" in names else options


def _clean(scores: PairScores) -> PairScores:
  """Returns float32 scores with 0 in rows of padding; lengths of 0 become 1."""
  kept = PairScores(*(keep(x, scores.weights) for x in scores))

  def one(tokens):
    return jnp.maximum(tokens, 1)

  return kept._replace(
    chosen_tokens=one(kept.chosen_tokens), rejected_tokens=one(kept.rejected_tokens)
  )


def _metrics(spec: PairLossSpec, scores: PairScores, beta: float) -> dict[str, Any]:
  if not spec.needs_reference:
    zero = jnp.zeros_like(scores.ref_chosen)
    scores = scores._replace(ref_chosen=zero, ref_rejected=zero)
  ratios = (pairs.mean_log_ratios if spec.averaged else pairs.log_ratios)(scores)
  chosen, rejected = (beta * ratio for ratio in ratios)
  metrics = {
    "rewards/chosen": chosen,
    "rewards/rejected": rejected,
    "rewards/margin": chosen - rejected,
    "rewards/accuracy": accuracy(chosen - rejected),
    "log_probs/chosen": scores.chosen,
    "log_probs/rejected": scores.rejected,
  }
  if spec.needs_reference:
    first = kl.k2(scores.chosen, scores.ref_chosen)
    metrics["kl"] = (first + kl.k2(scores.rejected, scores.ref_rejected)) / 2
  return metrics
