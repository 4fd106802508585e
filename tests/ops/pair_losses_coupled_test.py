import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.pair_scores import LN2, LN3, close, hand, random
from tunix.ops.preference import PAIR_LOSSES, PairScores, pair_loss
from tunix.ops.reductions import weighted_sum

COUPLED = [name for name, spec in PAIR_LOSSES.items() if spec.coupled]


def logistic(z):
  return np.log1p(np.exp(-np.asarray(z)))


def scores(chosen, rejected, ref_chosen, ref_rejected):
  ones = [1.0] * len(chosen)
  columns = chosen, rejected, ref_chosen, ref_rejected, ones, ones, ones
  return PairScores(*(jnp.array(x, jnp.float32) for x in columns))


# Margins of the policy u = (3, 1, 2), of the reference v = (0, 5, 1).
PAIRS = scores([-1, -4, -2], [-4, -5, -4], [-3, -1, -5], [-3, -6, -6])


def test_which_are_coupled():
  assert COUPLED == ["bco_pair", "aot", "aot_unpaired"]


def test_bco_pair():
  # Rewards (ln 3, 0) and (-ln 2, ln 2): their mean is ln 3 / 4.
  shift = LN3 / 4
  want = [
    logistic(LN3 - shift) + logistic(shift + LN2),
    logistic(-shift) + logistic(shift - LN2),
  ]
  close(pair_loss("bco_pair", hand(), beta=0.5).values, want)
  want = [math.log(4 / 3) + math.log(3 / 2), LN2 + LN3]
  close(pair_loss("bco_pair", hand(), beta=0.5, shift=0.0).values, want)


def test_the_shift_is_a_constant():
  fn = lambda c, **kw: pair_loss("bco_pair", hand()._replace(chosen=c), **kw).values
  gradient = lambda **kw: jax.jit(jax.grad(lambda c: fn(c, beta=0.5, **kw).sum()))(
    hand().chosen
  )
  close(gradient(), gradient(shift=LN3 / 4))
  # d -log s(x - d) = -(1 - s) beta
  close(gradient(shift=0.0), [-0.5 / 4, -0.5 / 2])


def test_aot():
  # Sorted 1 2 3 against 0 1 5; the pair of u = 3 is behind the 5.
  close(pair_loss("aot", PAIRS, beta=0.5).values, logistic([-1.0, 0.5, 0.5]))
  got = pair_loss("aot", PAIRS, beta=0.5, label_smoothing=0.1).values
  z = np.array([-1.0, 0.5, 0.5])
  close(got, 0.9 * logistic(z) + 0.1 * logistic(-z))


def test_aot_unpaired():
  # C = (2, -3, 3) and R = (-1, 1, 2); sorted -3 2 3 against -1 1 2.
  z = 0.5 * np.array([2 - 1, -3 + 1, 3 - 2])
  close(pair_loss("aot_unpaired", PAIRS, beta=0.5).values, logistic(z))
  got = pair_loss("aot_unpaired", PAIRS, beta=0.5, label_smoothing=0.1).values
  close(got, 0.9 * logistic(z) + 0.1 * logistic(-z))


def test_gradients_of_the_sorted_reach_their_pairs():
  fn = lambda c, r: pair_loss(
    "aot_unpaired", PAIRS._replace(chosen=c, rejected=r), beta=0.5
  ).values.sum()
  chosen, rejected = jax.jit(jax.grad(fn, (0, 1)))(PAIRS.chosen, PAIRS.rejected)
  slope = lambda z: -0.5 / (1 + math.exp(z))
  close(chosen, [slope(0.5), slope(-1.0), slope(0.5)])
  # R = (-1, 1, 2) were behind C = (-3, 2, 3).
  close(rejected, [-slope(-1.0), -slope(0.5), -slope(0.5)])


@pytest.mark.parametrize("name", COUPLED)
def test_padding_takes_no_rank_and_the_order_does_not_matter(name):
  given, rng = random(7), np.random.default_rng(1)
  total = lambda s: weighted_sum(pair_loss(name, s).values, s.weights)
  want = total(given)
  assert want.weight == 7
  padded = [np.append(x, np.full(3, np.nan)) for x in given[:-1]]
  padded.append(np.append(given.weights, np.zeros(3)))
  order = rng.permutation(10)
  got = total(PairScores(*(jnp.array(x[order], jnp.float32) for x in padded)))
  close(got.total, want.total)
  assert got.weight == 7


@pytest.mark.parametrize("name", COUPLED)
def test_one_pair_differs_from_the_pair_in_a_batch(name):
  given = random(7)
  alone = pair_loss(name, PairScores(*(x[:1] for x in given))).values
  assert abs(float(alone[0] - pair_loss(name, given).values[0])) > 1e-3


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_the_loss_is_that_of_the_sorted_samples(name):
  given = random(9, seed=3)
  c, r = given.chosen - given.ref_chosen, given.rejected - given.ref_rejected
  if name == "aot":
    c, r = given.chosen - given.rejected, given.ref_chosen - given.ref_rejected
  want = logistic(0.3 * (np.sort(c) - np.sort(r)))
  got = pair_loss(name, given, beta=0.3).values
  close(np.sort(got), np.sort(want))
