"""Values by hand; `hand` says which numbers come in."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.pair_scores import LN2, LN3, close, hand
from tunix.ops import pair_losses as pairs
from tunix.ops.preference import PairScores, pair_loss

LN6, LN7 = LN2 + LN3, math.log(7)
# beta times the log-ratios per token: (ln 3 / 2, 0) and (-ln 2 / 4, ln 2).
PER_TOKEN = np.array([LN3 / 2 + LN2 / 4, -LN2])


def loss(name, **options):
  return pair_loss(name, hand(), beta=0.5, **options).values


def logistic(z):
  return np.log1p(np.exp(-np.asarray(z)))


def test_sigmoid():
  close(loss("sigmoid"), [math.log(7 / 6), LN3])
  want = [0.9 * math.log(7 / 6) + 0.1 * LN7, 0.9 * LN3 + 0.1 * math.log(3 / 2)]
  close(loss("sigmoid", label_smoothing=0.1), want)


def test_smoothing_has_its_minimum_at_the_odds_of_the_labels():
  # cDPO: at s(beta D) = 1 - e there is no gradient.
  logits = jnp.array([math.log(0.8 / 0.2)])
  gradient = jax.jit(jax.grad(lambda z: pairs.smoothed_logistic(z, 0.2).sum()))(logits)
  close(gradient, [0.0], 1e-6)


def test_hinge():
  close(loss("hinge"), [0.0, 1 + LN2])  # 1 - ln 6 is negative


def test_ipo():
  # Per token C / |c| - R / |r| = 2 PER_TOKEN; the target is 1 / (2 beta) = 1.
  close(loss("ipo"), (2 * PER_TOKEN - 1) ** 2)
  close(loss("ipo", average=False), [(2 * LN6 - 1) ** 2, (-2 * LN2 - 1) ** 2])


def test_exo_pair():
  want = [
    6 / 7 * math.log((6 / 7) / 0.9) + 1 / 7 * math.log((1 / 7) / 0.1),
    1 / 3 * math.log((1 / 3) / 0.9) + 2 / 3 * math.log((2 / 3) / 0.1),
  ]
  close(loss("exo_pair", label_smoothing=0.1), want)
  # A divergence: 0 where s(beta D) is 1 - e.
  close(loss("exo_pair", label_smoothing=1 / 7)[0], 0.0, 1e-6)


def test_nca_pair():
  want = [
    math.log(4 / 3) + LN2 * 2 / 2 + math.log(3 / 2) / 2,
    LN2 + LN2 / 2 + LN3 / 2,
  ]
  close(loss("nca_pair"), want)


def test_robust():
  clean, flipped = np.array([math.log(7 / 6), LN3]), np.array([LN7, math.log(3 / 2)])
  close(loss("robust"), clean)
  close(loss("robust", label_smoothing=0.1), (0.9 * clean - 0.1 * flipped) / 0.8)


def test_robust_is_the_clean_loss_in_expectation():
  scores = hand()
  swapped = scores._replace(
    chosen=scores.rejected,
    rejected=scores.chosen,
    ref_chosen=scores.ref_rejected,
    ref_rejected=scores.ref_chosen,
  )
  run = lambda scores: pair_loss("robust", scores, beta=0.5, label_smoothing=0.2).values
  close(0.8 * run(scores) + 0.2 * run(swapped), loss("sigmoid"))


def test_sppo_hard():
  # 1 / (2 beta) is 1, C = (2 ln 3, 0), R = (-2 ln 2, 2 ln 2).
  want = [(2 * LN3 - 1) ** 2 + (1 - 2 * LN2) ** 2, 1 + (2 * LN2 + 1) ** 2]
  close(loss("sppo_hard"), want)


def test_apo():
  close(loss("apo_zero"), [1 / 4 + 1 / 3, 1 / 2 + 2 / 3])
  close(loss("apo_down"), [3 / 4 + 1 / 7, 1 / 2 + 2 / 3])


def test_discopop():
  # tau 1: m = (6/7, 1/3) and exp(-beta D) = (1/6, 2).
  want = [1 / 7 * math.log(7 / 6) + 6 / 7 / 6, 2 / 3 * LN3 + 1 / 3 * 2]
  close(loss("discopop", tau=1.0), want)
  # tau 1/2: m = s(2 ln 6) = 36/37, s(-2 ln 2) = 1/5.
  want = [1 / 37 * math.log(7 / 6) + 36 / 37 / 6, 4 / 5 * LN3 + 1 / 5 * 2]
  close(loss("discopop", tau=0.5), want)
  # By default m is nearly a step: exponential where won, logistic where lost.
  close(loss("discopop"), [1 / 6, LN3], 1e-4)


def test_sigmoid_norm():
  close(loss("sigmoid_norm"), logistic(PER_TOKEN))
  want = 0.9 * logistic(PER_TOKEN) + 0.1 * logistic(-PER_TOKEN)
  close(loss("sigmoid_norm", label_smoothing=0.1), want)


def without_reference():
  """Per token: P(c) = (1/2, 1/4), P(r) = (1/4, 1/2)."""
  counts = np.array([2.0, 3.0]), np.array([4.0, 5.0])
  chosen, rejected = np.log([1 / 2, 1 / 4]), np.log([1 / 4, 1 / 2])
  nan = np.full(2, np.nan)
  columns = chosen * counts[0], rejected * counts[1], nan, nan, *counts, np.ones(2)
  return PairScores(*(jnp.array(x, jnp.float32) for x in columns))


def test_simpo():
  scores = without_reference()
  z = np.array([2 * LN2, -2 * LN2])
  close(pair_loss("simpo", scores, beta=2.0, gamma=0).values, logistic(z))
  close(pair_loss("simpo", scores, beta=2.0).values, logistic(z - 0.5))
  got = pair_loss("simpo", scores, beta=2.0, gamma=1, label_smoothing=0.1).values
  close(got, 0.9 * logistic(z - 1) + 0.1 * logistic(1 - z))


def test_cpo():
  # Sums: chosen (-2 ln 2, -6 ln 2), rejected (-8 ln 2, -5 ln 2).
  scores, z = without_reference(), np.array([0.5 * 6 * LN2, -0.5 * LN2])
  got = pair_loss("cpo", scores, beta=0.5)
  close(got.metrics["sft_loss"], [LN2, 2 * LN2])
  close(got.values, logistic(z) + np.array([LN2, 2 * LN2]))
  got = pair_loss("cpo", scores, beta=0.5, cpo_alpha=0, label_smoothing=0.1).values
  close(got, 0.9 * logistic(z) + 0.1 * logistic(-z))


def test_orpo():
  # Odds: chosen (1, 1/3), rejected (1/3, 1); their ratios 3 and 1/3, s = 3/4 and 1/4.
  got = pair_loss("orpo", without_reference(), lambda_orpo=0.2)
  close(got.metrics["odds_ratio"], [LN3, -LN3])
  close(got.metrics["or_loss"], [math.log(4 / 3), 2 * LN2])
  close(got.metrics["sft_loss"], [LN2, 2 * LN2])
  close(got.values, [LN2 + 0.2 * math.log(4 / 3), 2 * LN2 + 0.4 * LN2])
  default = pair_loss("orpo", without_reference()).values
  close(default, [LN2 + 0.1 * math.log(4 / 3), 2 * LN2 + 0.2 * LN2])


def test_gradient_of_orpo_is_the_papers():
  # Equation 8 there: with m = mean log P, d(-log s(z)) = -(1 - s(z)) dz and
  # dz = dm_c / (1 - P(c)) - dm_r / (1 - P(r)).
  scores = without_reference()
  fn = lambda chosen, rejected: pair_loss(
    "orpo", scores._replace(chosen=chosen, rejected=rejected), lambda_orpo=1.0
  ).values.sum()
  gradients = jax.jit(jax.grad(fn, (0, 1)))(scores.chosen, scores.rejected)
  lost, counts = np.array([1 / 4, 3 / 4]), (np.array([2, 3]), np.array([4, 5]))
  close(gradients[0], (-1 - lost / np.array([1 / 2, 3 / 4])) / counts[0])
  close(gradients[1], lost / np.array([3 / 4, 1 / 2]) / counts[1])


@pytest.mark.parametrize("logp", [0.0, -1e-9, -1e-5, -1e-2, -5.0, -90.0, -1e4])
def test_odds_of_certain_and_impossible_responses(logp):
  """Against doubles, and finite where the odds are not."""
  chosen = jnp.array([logp], jnp.float32)
  one, other = jnp.ones(1), jnp.full(1, -1.0)
  scores = PairScores(chosen, other, one, one, one, one, one)
  fn = lambda x: pair_loss("orpo", scores._replace(chosen=x), lambda_orpo=1.0)
  got, gradient = fn(chosen), jax.jit(jax.grad(lambda x: fn(x).values.sum()))(chosen)
  assert np.isfinite(gradient).all()
  x = min(float(chosen[0]), pairs.MAX_MEAN_LOGP)
  odds = lambda x: x - math.log(-math.expm1(x))
  close(got.metrics["odds_ratio"][0], odds(x) - odds(-1.0), 2e-6)
  assert np.isfinite(got.values).all()
