"""KTO: a loss of single responses labeled desirable or not (arXiv:2402.01306)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from tunix.ops.pair_losses import PairLoss, masked
from tunix.ops.reductions import keep, safe_divide, weighted_sum
from tunix.utils.metric import Metric

METRICS = (
  Metric("rewards/chosen", "nats", "beta (log pi - log pi_0) of desirable examples"),
  Metric(
    "rewards/rejected", "nats", "beta (log pi - log pi_0) of undesirable examples"
  ),
  Metric("rewards/margin", "nats", "rewards/chosen - rewards/rejected"),
  Metric(
    "log_probs/chosen",
    "nats",
    "log-probability of desirable completions, summed over tokens",
  ),
  Metric(
    "log_probs/rejected",
    "nats",
    "log-probability of undesirable completions, summed over tokens",
  ),
  Metric("kl", "nats", "z0 of the formula, the estimated divergence of the batch"),
)


def kto_loss(
  logps: Float[Array, " B"],
  ref_logps: Float[Array, " B"],
  desirable: Bool[Array, " B"],
  weights: Shaped[Array, " B"],
  *,
  kl: jax.Array | float,
  beta: float = 0.1,
  desirable_weight: float = 1.0,
  undesirable_weight: float = 1.0,
) -> PairLoss:
  """Returns the KTO loss of each response (arXiv:2402.01306).

    w_D (1 - s(beta (r - z0)))   for a desirable response
    w_U (1 - s(beta (z0 - r)))   for an undesirable response

  with r = log pi - log pi_0 and s the logistic function.

  Args:
    logps: log-probabilities of the responses, summed over tokens, in nats;
      differentiated.
    ref_logps: the same under the reference; not differentiated.
    desirable: True for desirable responses.
    weights: 1 for an example, 0 for a row of padding.
    kl: z0, from `kl_estimate`; not differentiated.
    beta: strength of the reference, > 0.
    desirable_weight, undesirable_weight: w_D and w_U, >= 0, not both 0. With n_D
      desirable and n_U undesirable examples, the paper recommends
      w_D n_D / (w_U n_U) between 1 and 4/3.

  Returns:
    Values [B], to be averaged over all examples, and metrics [B]: `kl` is z0;
    rewards/chosen (beta r where desirable, else 0), rewards/rejected, log_probs/chosen,
    log_probs/rejected, chosen_share (1 where desirable). After averaging, `kto_metrics`
    turns them into means over desirable and undesirable examples.

  Raises:
    ValueError: beta or a weight is out of range.
  """
  _check(beta, desirable_weight, undesirable_weight)
  logps, ref_logps = keep(logps, weights), keep(ref_logps, weights)
  ratio = logps - jax.lax.stop_gradient(ref_logps)
  gap = beta * (ratio - jax.lax.stop_gradient(kl))
  good = desirable_weight * jax.nn.sigmoid(-gap)
  values = jnp.where(desirable, good, undesirable_weight * jax.nn.sigmoid(gap))
  yes, no = desirable.astype(ratio.dtype), (~desirable).astype(ratio.dtype)
  metrics = {
    "rewards/chosen": beta * ratio * yes,
    "rewards/rejected": beta * ratio * no,
    "log_probs/chosen": logps * yes,
    "log_probs/rejected": logps * no,
    "chosen_share": yes,
    "kl": jnp.broadcast_to(jnp.asarray(kl, ratio.dtype), ratio.shape),
  }
  return masked(values, metrics, weights)


def kl_estimate(
  logps: Float[Array, " B"],
  ref_logps: Float[Array, " B"],
  weights: Shaped[Array, " B"],
) -> Float[Array, ""]:
  """Returns z0 = max(0, mean of log pi(y'|x) - log pi_0(y'|x)).

  Args:
    logps, ref_logps: log-probabilities of prompts x with the response y' of ANOTHER
      example, summed over tokens, in nats. They are those of the global batch, so that
      its split into micro-batches does not change z0.
    weights: 0 for rows of padding.

  Returns:
    A number >= 0 in nats, without gradient; 0 without rows.
  """
  gap = keep(logps, weights) - keep(ref_logps, weights)
  return jax.lax.stop_gradient(jnp.maximum(weighted_sum(gap, weights).mean(), 0.0))


def kto_metrics(means: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """Returns means over desirable and undesirable examples, from means over all.

  Args:
    means: metrics of `kto_loss`, averaged with the weights of the examples.

  Returns:
    The same names without `chosen_share`, and rewards/margin. A mean over no example
    is 0.
  """
  share = means["chosen_share"]
  out = {name: x for name, x in means.items() if name != "chosen_share"}
  for name in ("rewards", "log_probs"):
    out[f"{name}/chosen"] = safe_divide(means[f"{name}/chosen"], share)
    out[f"{name}/rejected"] = safe_divide(means[f"{name}/rejected"], 1 - share)
  out["rewards/margin"] = out["rewards/chosen"] - out["rewards/rejected"]
  return out


def _check(beta: float, desirable_weight: float, undesirable_weight: float) -> None:
  if not beta > 0:
    raise ValueError(f"beta={beta} must be positive; 0.1 is usual")
  weights = desirable_weight, undesirable_weight
  if min(weights) < 0 or max(weights) == 0:
    raise ValueError(
      f"desirable_weight={desirable_weight}, undesirable_weight={undesirable_weight}: "
      "both must be >= 0 and one positive"
    )
