"""KTO: a loss from single responses that are desirable or not (arXiv:2402.01306)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from tunix.ops.pair_losses import PairLoss, masked
from tunix.ops.reductions import keep, safe_divide, weighted_sum


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
  """w_D (1 - s(beta (r - z0))) of a desirable response, w_U (1 - s(beta (z0 - r))) of
  another: KTO (arXiv:2402.01306), with r = log pi - log pi_0.

  Args:
    logps: of the responses, summed over tokens, in nats; differentiated.
    ref_logps: likewise under the reference; constants.
    desirable: which responses are good.
    weights: 1 for an example, 0 for a row that only fills the batch up.
    kl: z0, from `kl_estimate`; no gradient passes.
    beta: > 0.
    desirable_weight, undesirable_weight: w_D and w_U, >= 0, not both 0. The paper keeps
      w_D n_D / (w_U n_U) between 1 and 4/3 for n_D and n_U examples of each.

  Returns:
    Values [B], to be averaged over all examples, and metrics [B]: `kl` is z0;
    rewards/chosen (beta r where desirable, else 0), rewards/rejected, log_probs/chosen,
    log_probs/rejected, chosen_share (1 where desirable). After averaging,
    `kto_metrics` makes means over each kind of them.

  Raises:
    ValueError: beta or weights out of range.
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
  """z0 = max(0, mean of log pi(y'|x) - log pi_0(y'|x)).

  Args:
    logps, ref_logps: of prompts x with the response y' of ANOTHER example, summed over
      tokens; of the whole global batch, so that a split does not change it.
    weights: 0 where a row does not count.

  Returns:
    A constant >= 0, in nats; 0 without rows.
  """
  gap = keep(logps, weights) - keep(ref_logps, weights)
  return jax.lax.stop_gradient(jnp.maximum(weighted_sum(gap, weights).mean(), 0.0))


def kto_metrics(means: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """Averages over each kind of example, from averages over all.

  Args:
    means: the metrics of `kto_loss`, each averaged with the examples' weights.

  Returns:
    The same names without `chosen_share`, and rewards/margin. 0 for a kind that has no
    example.
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
