"""Losses from pairs of responses by name, with the metrics people watch.

  scores = PairScores(chosen, rejected, ref_chosen, ref_rejected, ..., weights)
  loss = pair_loss("sigmoid", scores, beta=0.1)
  weighted_sum(loss.values, scores.weights)

`PAIR_LOSSES` lists them; formulas and papers are in `pair_losses` and
`pair_losses_coupled`. KTO, from single responses, is in `kto`.
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


class PairLossSpec(NamedTuple):
  """A pair loss and what a trainer must know of it.

  Attributes:
    function: (PairScores, *, options) -> values [B] or PairLoss (whose metrics are
      added); what it is called with has 0 in padding rows.
    needs_reference: it reads ref_chosen and ref_rejected.
    coupled: a pair's value depends on the other pairs: it must be given the global
      batch, or be split by `coupled_coefficients`.
    averaged: its rewards are per token, and so are those of the metrics.
  """

  function: Callable[..., Any]
  needs_reference: bool = True
  coupled: bool = False
  averaged: bool = False

  @property
  def options(self) -> tuple[str, ...]:
    """Names of the options, `beta` and `label_smoothing` among them if taken."""
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
  """A coupled loss, linear in the log-probabilities of the pairs; [B] each, constants.

  Attributes:
    values: of the pairs.
    chosen: derivative of sum(weights * values) in the log-probability of the chosen.
    rejected: likewise of the rejected.
  """

  values: jax.Array
  chosen: jax.Array
  rejected: jax.Array


def pair_loss_spec(loss: Loss) -> PairLossSpec:
  """The entry of `PAIR_LOSSES`, or one made of a user's function (with a reference,
  not coupled, rewards of sums; pass a PairLossSpec to say otherwise).

  Raises:
    ValueError: an unknown name.
    TypeError: neither a name nor callable.
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
  **options: Any,
) -> PairLoss:
  """A loss of every pair, and metrics.

  Metrics (constants; of the losses with `averaged` the rewards are per token):

    rewards/chosen, rewards/rejected   beta (log pi - log pi_0)
    rewards/margin                     their difference
    rewards/accuracy                   1 where the margin is positive, 1/2 where it is 0
                                       (a policy that still is its reference is at
                                       chance; TRL counts it as wrong)
    log_probs/chosen, log_probs/rejected   sums over tokens, of the policy
    kl                                 with a reference: k2, (log pi - log pi_0)^2 / 2,
                                       mean of the two responses. It is small exactly
                                       where the policy is near the reference; for
                                       responses that it would draw itself it estimates
                                       the divergence.

  and those of cpo (sft_loss) and orpo (odds_ratio, sft_loss, or_loss).

  Args:
    loss: a name of `PAIR_LOSSES`, a PairLossSpec, or a function of scores and options.
    scores: [B]; a coupled loss needs the whole global batch. Rows of weight 0 may hold
      anything.
    beta: strength of the reference (its inverse is a temperature), > 0. orpo takes
      none: there it scales the metrics' rewards alone.
    label_smoothing: of the losses that take it; others refuse a value other than 0.
    **options: those of the loss.

  Returns:
    PairLoss of [B]; 0 where the weight is 0.

  Raises:
    ValueError: an unknown loss or option, or an option out of its range.
  """
  spec = pair_loss_spec(loss)
  options = _checked(loss, spec, beta, label_smoothing, options)
  scores = _clean(scores)
  out = spec.function(scores, **options)
  values, more = out if isinstance(out, PairLoss) else (out, {})
  return masked(values, {**_metrics(spec, scores, beta), **more}, scores.weights)


def check_pair_loss(
  loss: Loss, *, beta: float = 0.1, label_smoothing: float = 0.0, **options: Any
) -> None:
  """Refuses what `pair_loss` would refuse, without scores: for a config.

  Raises:
    ValueError, TypeError: as `pair_loss` and `pair_loss_spec`.
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
  """First of two passes of a coupled loss over micro-batches: its exact gradient.

  A loss of the global batch has, in the log-probabilities of each pair, a derivative
  that depends on all pairs. It is taken here from the scores of all, which need no
  gradient; `coupled_loss` then gives every micro-batch its share.

  Args and Raises as `pair_loss`; `scores` are the whole global batch's.
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
  """Second pass: the pairs' values, whose gradient is that of the global batch's loss.

  Args:
    loss, beta: as for `coupled_coefficients`.
    coefficients: the rows of this micro-batch.
    scores: of this micro-batch, differentiated.

  Returns:
    As `pair_loss`: weight it with the pairs' weights.
  """
  spec, scores = pair_loss_spec(loss), _clean(scores)
  change = lambda x: x - jax.lax.stop_gradient(x)
  slope = coefficients.chosen * change(scores.chosen)
  slope += coefficients.rejected * change(scores.rejected)
  values = coefficients.values + safe_divide(slope, scores.weights)
  return masked(values, _metrics(spec, scores, beta), scores.weights)


def accuracy(margins: jax.Array) -> jax.Array:
  """1 where a margin is positive, 1/2 where it is 0, 0 where it is negative."""
  return (jnp.sign(margins) + 1) / 2


def _checked(
  loss: Loss, spec: PairLossSpec, beta: float, label_smoothing: float, options: dict
) -> dict[str, Any]:
  """The options to call the function with."""
  if not beta > 0:
    raise ValueError(f"beta={beta} must be positive; 0.1 is usual for DPO")
  name, known = loss if isinstance(loss, str) else "this function", spec.options
  if label_smoothing or "label_smoothing" in known:
    options = {"label_smoothing": label_smoothing, **options}
  unknown = [option for option in options if option not in known]
  if unknown:
    taken = [option for option in known if option != "beta"]
    raise ValueError(
      f"pair loss {name} takes no {', '.join(unknown)}: its options are {taken}"
    )
  return {"beta": beta, **options} if "beta" in known else options


def _clean(scores: PairScores) -> PairScores:
  """Float32, with nothing in padding rows; lengths of 0 become 1."""
  kept = PairScores(*(keep(x, scores.weights) for x in scores))
  one = lambda tokens: jnp.maximum(tokens, 1)
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
