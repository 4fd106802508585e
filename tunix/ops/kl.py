"""Kullback-Leibler divergence of the trained policy from a reference, in nats.

The estimators look at the sampled tokens alone (http://joschu.net/blog/kl-approx.html).
With log r = logps - ref_logps at a token drawn from the policy:

  k1 = log r                   unbiased, may be negative
  k2 = (log r)^2 / 2           biased, never negative
  k3 = 1/r - 1 + log r         unbiased, never negative

As part of the REWARD (no gradient through it) k1 gives the gradient of the divergence;
k2 and k3 do not. As part of the LOSS it is the other way round: the expected gradient
of k1 is zero, that of k2 is the gradient of KL(policy || reference) at every prefix and
that of k3 the gradient of KL(reference || policy), both without the effect of a token
on later prefixes; `corrected` turns k1 and k3 into k2 there.
tests/ops/true_gradient_test.py has the proofs in numbers.
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
  """log r: for the reward. As a loss it only adds noise."""
  return logps - ref_logps


def k2(
  logps: Float[Array, "B T"], ref_logps: Float[Array, "B T"]
) -> Float[Array, "B T"]:
  """(log r)^2 / 2: for the loss, where its gradient is that of the reverse KL."""
  return jnp.square(logps - ref_logps) / 2


def k3(
  logps: Float[Array, "B T"], ref_logps: Float[Array, "B T"]
) -> Float[Array, "B T"]:
  """1/r - 1 + log r: GRPO's term of the loss (arXiv:2402.03300, equation 4).

  log r is cut at -20 from below, so that one token far from the reference cannot make
  a loss infinite; beyond the cut there is no gradient.
  """
  log_r = jnp.maximum(logps - ref_logps, -MAX_EXPONENT)
  # Near 0 the terms cancel; expm1 loses half as many digits as exp.
  return jnp.expm1(-log_r) + log_r


def corrected(
  values: Float[Array, "B T"], log_ratio: Float[Array, "B T"]
) -> Float[Array, "B T"]:
  """An estimate times the ratio of the policies, for the loss (arXiv:2512.02556).

  The ratio is differentiated: where it is 1 the value stays as it is, and the gradient
  of k1 and k3 becomes that of KL(policy || reference) at every prefix. Off-policy it
  weighs the tokens as the new policy would draw them.

  Args:
    values: k1 or k3.
    log_ratio: from `policy_gradient.log_ratio`, token level.
  """
  return safe_exp(log_ratio) * values


def exact(
  logits: Float[Array, "*B V"], ref_logits: Float[Array, "*B V"]
) -> Float[Array, "*B"]:
  """sum_v p(v) (log p(v) - log q(v)) over the vocabulary, at given prefixes.

  Words of p = 0 (logit -inf) count 0, as in the limit.
  """
  logps = jax.nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, "float32")))
  ref = jax.nn.log_softmax(ref_logits.astype(logps.dtype))
  possible = logps > -jnp.inf
  gap = jnp.where(possible, logps, 0.0) - jnp.where(possible, ref, 0.0)
  return jnp.sum(jnp.where(possible, jnp.exp(logps), 0.0) * gap, axis=-1)


Estimator = Callable[[jax.Array, jax.Array], jax.Array]

# By name; the second line has names that users of other libraries know.
ESTIMATORS: dict[str, Estimator] = {
  **{"k1": k1, "k2": k2, "k3": k3},
  **{"kl": k1, "mse_kl": k2, "low_var_kl": k3},
}
