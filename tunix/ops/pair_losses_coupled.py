"""Pair losses whose value of one pair depends on the other pairs of the global batch.

They take the arrays of the whole global batch; `preference.coupled_coefficients` cuts
them into micro-batches. Symbols as in `pair_losses`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tunix.ops.pair_losses import PairScores, log_ratios, smoothed_logistic
from tunix.ops.reductions import weighted_sum


def bco_pair(
  scores: PairScores, *, beta: float, shift: float | None = None
) -> Float[Array, " B"]:
  """-log s(beta C - d) - log s(-(beta R - d)): BCO on pairs (arXiv:2404.04656).

  The shift d is a constant: the mean of beta C and beta R over the batch, (E[beta C] +
  E[beta R]) / 2, where the paper has a moving average of it.

  Args:
    shift: a number to be used instead of the batch's mean.
  """
  chosen, rejected = (beta * ratio for ratio in log_ratios(scores))
  if shift is None:
    mean = weighted_sum((chosen + rejected) / 2, scores.weights).mean()
    middle = jax.lax.stop_gradient(mean)
  else:
    middle = jnp.asarray(shift, jnp.float32)
  return -jax.nn.log_sigmoid(chosen - middle) - jax.nn.log_sigmoid(middle - rejected)


def aot(
  scores: PairScores, *, beta: float, label_smoothing: float = 0.0
) -> Float[Array, " B"]:
  """-log s(beta (u_(i) - v_(i))) over sorted u and v: AOT on pairs (arXiv:2406.05882).

  u = log pi(c) - log pi(r) and v the same of the reference, each sorted over the batch:
  the i-th smallest margins are compared, so that the distribution of the policy's
  dominates the reference's. `label_smoothing` as for `sigmoid`. A pair's value is that
  of the rank which its u has.
  """
  margins = scores.chosen - scores.rejected
  reference = scores.ref_chosen - scores.ref_rejected
  behind = _of_same_rank(margins, reference, scores.weights)
  return smoothed_logistic(beta * (margins - behind), label_smoothing)


def aot_unpaired(
  scores: PairScores, *, beta: float, label_smoothing: float = 0.0
) -> Float[Array, " B"]:
  """-log s(beta (C_(i) - R_(i))) over sorted C and R: AOT on unpaired responses
  (arXiv:2406.05882).

  `label_smoothing` as for `sigmoid`. A pair's value is that of the rank which its C
  has: the R compared with it may be another pair's.
  """
  chosen, rejected = log_ratios(scores)
  behind = _of_same_rank(chosen, rejected, scores.weights)
  return smoothed_logistic(beta * (chosen - behind), label_smoothing)


def _of_same_rank(x: jax.Array, y: jax.Array, weights: jax.Array) -> jax.Array:
  """For each x[i] the y that has among the y the rank of x[i] among the x.

  Padding ranks last on both sides and so meets padding alone.
  """
  last = lambda a: jnp.where(weights != 0, a, jnp.inf)
  ranks = jnp.argsort(jnp.argsort(last(x)))
  return y[jnp.argsort(last(y))][ranks]
