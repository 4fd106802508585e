"""Pair losses that compare all pairs of the global batch with each other.

The value of one pair depends on the other pairs, so these functions need the arrays of
the global batch. `preference.coupled_coefficients` computes their gradient over
micro-batches. `pair_losses` explains the symbols.
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
  """Returns -log s(beta C - d) - log s(-(beta R - d)): BCO on pairs (arXiv:2404.04656).

  The shift d is (E[beta C] + E[beta R]) / 2 over the batch, without gradient. The paper
  uses a moving average of it.

  Args:
    scores: scores of the global batch.
    beta: strength of the reference.
    shift: value of d; None computes it from the batch.
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
  """Returns -log s(beta (u_(i) - v_(i))): AOT on pairs (arXiv:2406.05882).

  u = log pi(c) - log pi(r) are the margins of the policy and v those of the reference.
  u_(i) and v_(i) are the i-th smallest of each over the batch. The loss makes the
  distribution of the policy's margins larger than that of the reference at every rank
  (first-order stochastic dominance). The value at position j is that of the rank of
  u_j. `label_smoothing` is as for `sigmoid`.
  """
  margins = scores.chosen - scores.rejected
  reference = scores.ref_chosen - scores.ref_rejected
  matched = _match_ranks(margins, reference, scores.weights)
  return smoothed_logistic(beta * (margins - matched), label_smoothing)


def aot_unpaired(
  scores: PairScores, *, beta: float, label_smoothing: float = 0.0
) -> Float[Array, " B"]:
  """Returns -log s(beta (C_(i) - R_(i))): AOT on unpaired responses (arXiv:2406.05882).

  C_(i) and R_(i) are the i-th smallest log-ratios over the batch, so a C may be
  compared with the R of another pair. The value at position j is that of the rank of
  C_j. `label_smoothing` is as for `sigmoid`.
  """
  chosen, rejected = log_ratios(scores)
  matched = _match_ranks(chosen, rejected, scores.weights)
  return smoothed_logistic(beta * (chosen - matched), label_smoothing)


def _match_ranks(x: jax.Array, y: jax.Array, weights: jax.Array) -> jax.Array:
  """Reorders y [B] so that position j holds the y with the same rank as x[j].

  Example: x = (5, 1, 3) has the ranks (2, 0, 1), so y = (20, 30, 10) becomes
  (30, 10, 20).

  Args:
    x: values whose ranks are matched.
    y: values to reorder.
    weights: 0 for rows of padding, which rank last in both x and y.
  """

  def padding_last(values):
    return jnp.where(weights != 0, values, jnp.inf)

  # argsort lists positions by rank; the argsort of that list gives each position's
  # rank.
  ranks = jnp.argsort(jnp.argsort(padding_last(x)))
  return y[jnp.argsort(padding_last(y))][ranks]
