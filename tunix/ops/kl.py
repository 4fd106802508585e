"""Kullback-Leibler divergence of the trained policy from a reference, in nats.

The estimators use only the sampled tokens (http://joschu.net/blog/kl-approx.html). With
log r = logps - ref_logps of a token sampled from the policy:

  k1 = log r                   unbiased, may be negative
  k2 = (log r)^2 / 2           biased, never negative
  k3 = 1/r - 1 + log r         unbiased, never negative

As part of the REWARD, which is not differentiated, k1 gives the gradient of the
divergence; k2 and k3 do not. As part of the LOSS, the expected gradient of k1 is 0. The
gradient of k2 is that of KL(policy || reference) at every prefix, and the gradient of
k3 that of KL(reference || policy). Both ignore the effect of a token on later prefixes.
`corrected` gives k1 and k3 the gradient of k2 in the loss.
tests/ops/true_gradient_test.py checks these statements with numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tunix.ops.reductions import MAX_EXPONENT, safe_exp


def k1(
  logps: Float[Array, "B T"], ref_logps: Float[Array, "B T"]
) -> Float[Array, "B T"]:
  """Returns log r, for the reward. In the loss its expected gradient is 0."""
  return logps - ref_logps


def k2(
  logps: Float[Array, "B T"], ref_logps: Float[Array, "B T"]
) -> Float[Array, "B T"]:
  """Returns (log r)^2 / 2, for the loss; its gradient is that of the reverse KL."""
  return jnp.square(logps - ref_logps) / 2


def k3(
  logps: Float[Array, "B T"], ref_logps: Float[Array, "B T"]
) -> Float[Array, "B T"]:
  """Returns 1/r - 1 + log r: GRPO's term of the loss (arXiv:2402.03300, equation 4).

  log r is clipped at -20 from below, so that one token far from the reference cannot
  make a loss infinite. Below -20 the gradient is 0.
  """
  log_r = jnp.maximum(logps - ref_logps, -MAX_EXPONENT)
  # If log r is near 0, the terms cancel, and the result is about (log r)^2 / 2. expm1
  # loses half as many digits as exp here.
  return jnp.expm1(-log_r) + log_r


def corrected(
  values: Float[Array, "B T"], log_ratio: Float[Array, "B T"]
) -> Float[Array, "B T"]:
  """Returns values times the ratio of the policies, for the loss (arXiv:2512.02556).

  The ratio is differentiated. If the ratio is 1, the value does not change, but the
  gradient of k1 and k3 becomes that of KL(policy || reference) at every prefix. If the
  samples come from an older policy, the ratio corrects for the changed probability of
  each token.

  Args:
    values: `k1` or `k3` of each token.
    log_ratio: log-ratio at token level, from `policy_gradient.log_ratio`.
  """
  return safe_exp(log_ratio) * values


def exact(
  logits: Float[Array, "*B V"], ref_logits: Float[Array, "*B V"]
) -> Float[Array, "*B"]:
  """Returns sum_v p(v) (log p(v) - log q(v)) over the vocabulary, per prefix.

  A token v with p(v) = 0 (logit -inf) contributes 0, which is the limit.

  Args:
    logits: logits of the policy.
    ref_logits: logits of the reference.
  """
  logps = jax.nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, "float32")))
  ref = jax.nn.log_softmax(ref_logits.astype(logps.dtype))
  possible = logps > -jnp.inf
  gap = jnp.where(possible, logps, 0.0) - jnp.where(possible, ref, 0.0)
  return jnp.sum(jnp.where(possible, jnp.exp(logps), 0.0) * gap, axis=-1)


Estimator = Callable[[jax.Array, jax.Array], jax.Array]

# Name -> estimator. The last line has the names that other libraries use.
ESTIMATORS: dict[str, Estimator] = {
  **{"k1": k1, "k2": k2, "k3": k3},
  **{"kl": k1, "mse_kl": k2, "low_var_kl": k3},
}
