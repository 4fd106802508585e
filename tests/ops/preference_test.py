"""What all pair losses have in common: options, padding, metrics, two passes."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.pair_scores import LN2, LN3, close, hand, random
from tunix.ops.preference import (
  PAIR_LOSSES,
  CoupledCoefficients,
  PairLoss,
  PairLossSpec,
  PairScores,
  check_pair_loss,
  coupled_coefficients,
  coupled_loss,
  pair_loss,
  pair_loss_spec,
)
from tunix.ops.reductions import weighted_sum

NAMES = list(PAIR_LOSSES)
NEEDED = {"exo_pair": {"label_smoothing": 0.1}}
COUPLED = [name for name, spec in PAIR_LOSSES.items() if spec.coupled]
# Another value than the default of every option, by name.
OTHER = {
  **{"beta": 0.7, "label_smoothing": 0.2, "average": False, "shift": 0.4, "tau": 2.0},
  **{"gamma": 2.0, "cpo_alpha": 0.3, "lambda_orpo": 3.0},
}
# Of the batches here: equal shapes are compiled once.
SIZE = 7


def run(name, scores, **options):
  return pair_loss(name, scores, **{**NEEDED.get(name, {}), **options})


def gradients(fn, scores):
  """Of a function of scores, in the two log-probabilities."""
  of = lambda c, r: fn(scores._replace(chosen=c, rejected=r))
  return jax.jit(jax.grad(of, (0, 1)))(scores.chosen, scores.rejected)


def moved(scores, field, row, by):
  return scores._replace(**{field: getattr(scores, field).at[row].add(by)})


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_the_slopes(name):
  """Those of the loss: nothing comes through the metrics."""
  scores, h = random(SIZE), 1e-2
  options = {"shift": 0.3} if name == "bco_pair" else {}  # the mean is a constant
  values = lambda s: run(name, s, beta=0.5, **options).values
  everything = lambda s: run(name, s, beta=0.5, **options)
  total = lambda s: sum(x.sum() for x in jax.tree.leaves(everything(s)))
  got = gradients(total, scores)
  for field, gradient in zip(("chosen", "rejected"), got, strict=True):
    for i in (0, 3):
      up, down = (values(moved(scores, field, i, by)) for by in (h, -h))
      close(jnp.sum(up - down) / (2 * h), gradient[i], 2e-3)


# Squares have a target and can overshoot it; the discovered loss has a small dip.
NOT_MONOTONE = {"ipo", "sppo_hard", "discopop"}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_MONOTONE])
def test_a_step_prefers_the_chosen(name):
  chosen, rejected = gradients(lambda s: run(name, s).values.sum(), random(SIZE))
  if name == "apo_down":  # it makes both less likely, the rejected more so
    assert (np.asarray(rejected) > np.asarray(chosen)).all()
    return
  assert (np.asarray(chosen) <= 0).all() and (np.asarray(rejected) >= 0).all()
  assert np.asarray(chosen).any() and np.asarray(rejected).any()


@pytest.mark.parametrize("name", NAMES)
def test_padding_is_harmless(name):
  real = np.arange(SIZE) < SIZE - 2
  fill = lambda x: [np.where(real, y, x) for y in random(SIZE)[:-1]]
  given = lambda x: PairScores(*(jnp.array(y, jnp.float32) for y in (*fill(x), real)))
  got, want = run(name, given(np.nan)), run(name, given(1.0))
  jax.tree.map(np.testing.assert_array_equal, got, want)
  for x in jax.tree.leaves(got):
    np.testing.assert_array_equal(x[-2:], [0, 0])
  if name not in COUPLED:
    close(got.values[:-2], run(name, random(SIZE)).values[:-2])
  total = lambda s: run(name, s).values.sum()
  slopes = [gradients(total, given(x)) for x in (np.nan, 1.0)]
  for x, y in zip(*slopes, strict=True):
    np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(x[-2:], [0, 0])
  empty = run(name, given(np.nan)._replace(weights=jnp.zeros(SIZE)))
  np.testing.assert_array_equal(empty.values, np.zeros(SIZE))


@pytest.mark.parametrize("name", NAMES)
def test_extremes_stay_finite(name):
  """Vast gaps, certain responses, and one without tokens."""
  far = jnp.array([-1e4, -1e4, 0.0, 0.0, -50.0, -1e-3, -88.0])
  other = jnp.array([0.0, -1e4, -1e4, 0.0, -1e-8, -88.0, -1e-3])
  reference, tokens = jnp.full(SIZE, -7.0), jnp.array([1.0, 4, 1, 0, 2, 1, 1])
  columns = far, other, reference, reference, tokens, tokens, jnp.ones(SIZE)
  scores = PairScores(*columns)
  for x in jax.tree.leaves(run(name, scores)):
    assert np.isfinite(x).all()
  for x in gradients(lambda s: run(name, s).values.sum(), scores):
    assert np.isfinite(x).all()


@pytest.mark.parametrize("name", NAMES)
def test_jit_equals_eager(name):
  scores = random(SIZE)
  got = jax.jit(lambda s: run(name, s))(scores)
  jax.tree.map(close, got, run(name, scores))


@pytest.mark.parametrize(
  ("name", "option"),
  [(name, option) for name, spec in PAIR_LOSSES.items() for option in spec.options],
)
def test_every_option_changes_the_loss(name, option):
  scores = random(SIZE)
  changed = run(name, scores, **{option: OTHER[option]})
  assert np.abs(changed.values - run(name, scores).values).max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_counts_where_the_table_says_so(name):
  scores = random(SIZE)
  one, two = run(name, scores), run(name, moved(scores, "ref_chosen", 1, 2.0))
  same = lambda x, y: np.allclose(x, y, rtol=1e-6)
  rewards = one.metrics["rewards/chosen"], two.metrics["rewards/chosen"]
  free = not PAIR_LOSSES[name].needs_reference
  assert same(one.values, two.values) == same(*rewards) == free
  assert ("kl" in run(name, scores).metrics) == PAIR_LOSSES[name].needs_reference


# Metrics


def test_metrics_by_hand():
  got = pair_loss("sigmoid", hand(), beta=0.5).metrics
  close(got["rewards/chosen"], [LN3, 0])
  close(got["rewards/rejected"], [-LN2, LN2])
  close(got["rewards/margin"], [LN3 + LN2, -LN2])
  close(got["rewards/accuracy"], [1, 0])
  close(got["log_probs/chosen"], [2 * LN3 - 10, -7])
  close(got["log_probs/rejected"], [-2 * LN2 - 7, 2 * LN2 - 9])
  # Squares of the log-ratios (2 ln 3, 0) and (-2 ln 2, 2 ln 2), halved, averaged.
  close(got["kl"], [LN3**2 + LN2**2, LN2**2])
  assert len(got) == 7


def test_rewards_of_averaged_losses_are_per_token():
  got = pair_loss("ipo", hand(), beta=0.5).metrics
  close(got["rewards/chosen"], [LN3 / 2, 0])
  close(got["rewards/margin"], [LN3 / 2 + LN2 / 4, -LN2])
  got = pair_loss("orpo", hand()).metrics
  close(got["rewards/chosen"], 0.1 * np.array([LN3 - 5, -7 / 5]))
  # Sums put the second pair right and means put it wrong.
  tokens = hand()._replace(chosen_tokens=jnp.ones(2), rejected_tokens=jnp.full(2, 9.0))
  sums, means = (run(name, tokens).metrics for name in ("cpo", "simpo"))
  assert not np.array_equal(sums["rewards/accuracy"], means["rewards/accuracy"])


def test_beta_scales_the_rewards_of_orpo():
  one, two = (pair_loss("orpo", hand(), beta=beta) for beta in (0.1, 0.2))
  close(one.values, two.values)
  close(2 * one.metrics["rewards/margin"], two.metrics["rewards/margin"])


def test_a_policy_that_is_its_reference_is_at_chance():
  scores = random(SIZE)
  same = scores._replace(ref_chosen=scores.chosen, ref_rejected=scores.rejected)
  got = pair_loss("sigmoid", same)
  close(got.metrics["rewards/accuracy"], [0.5] * SIZE)
  close(got.metrics["kl"], [0] * SIZE)
  close(got.values, [LN2] * SIZE)


def test_lower_precision_comes_in_and_float32_goes_out():
  scores = PairScores(*(x.astype(jnp.bfloat16) for x in hand()))
  got = pair_loss("sigmoid", scores)
  assert got.values.dtype == got.metrics["kl"].dtype == jnp.float32


# Two passes


def cut(tree, start, stop):
  return jax.tree.map(lambda x: x[start:stop], tree)


@pytest.mark.parametrize("name", [*COUPLED, "sigmoid"])
def test_two_passes_give_the_gradient_of_the_whole_batch(name):
  """Of any split, with padding in it."""
  scores = random(SIZE)._replace(weights=jnp.array([1.0, 1, 0, 1, 1, 1, 0]))
  options = {"beta": 0.4}
  if "label_smoothing" in PAIR_LOSSES[name].options:
    options["label_smoothing"] = 0.1
  total = lambda s: weighted_sum(pair_loss(name, s, **options).values, s.weights).total
  want = gradients(total, scores)
  coefficients = coupled_coefficients(name, scores, **options)
  assert isinstance(coefficients, CoupledCoefficients)

  def share(scores, coefficients):
    values = coupled_loss(name, coefficients, scores, 0.4).values
    return weighted_sum(values, scores.weights).total

  for cuts in ((0, 7), (0, 2, 7)):
    rows = list(itertools.pairwise(cuts))
    parts = [(cut(coefficients, *row), cut(scores, *row)) for row in rows]
    found = [gradients(functools.partial(share, coefficients=c), s) for c, s in parts]
    for got, expected in zip(zip(*found, strict=True), want, strict=True):
      close(np.concatenate(got), expected)
    close(sum(share(s, c) for c, s in parts), total(scores))
  metrics = coupled_loss(name, coefficients, scores, 0.4).metrics
  jax.tree.map(close, metrics, pair_loss(name, scores, **options).metrics)


def test_the_second_pass_may_see_other_scores():
  # The value stays that of the first pass, plus the slope along the change.
  first, second = random(SIZE), random(SIZE, seed=9)
  coefficients = coupled_coefficients("aot", first)
  got = coupled_loss("aot", coefficients, second)
  close(got.values, coefficients.values)
  close(got.metrics["log_probs/chosen"], second.chosen)


def test_fractional_weights_in_two_passes():
  scores = random(SIZE)._replace(weights=jnp.array([0.5, 2, 1, 0, 1, 3, 1]))
  total = lambda s: weighted_sum(pair_loss("aot", s).values, s.weights).total
  coefficients = coupled_coefficients("aot", scores)
  again = lambda s: (
    weighted_sum(coupled_loss("aot", coefficients, s).values, s.weights).total
  )
  for got, want in zip(gradients(again, scores), gradients(total, scores), strict=True):
    close(got, want)


# A user's own


def test_a_function_is_a_loss():
  def squared(scores, *, beta, power=2):
    return (1 - beta * (scores.chosen - scores.rejected)) ** power

  gap = np.asarray(hand().chosen - hand().rejected)
  close(pair_loss(squared, hand(), beta=0.5).values, (1 - 0.5 * gap) ** 2)
  close(pair_loss(squared, hand(), beta=0.5, power=4).values, (1 - 0.5 * gap) ** 4)
  with pytest.raises(ValueError, match=r"takes no label_smoothing.*\['power'\]"):
    pair_loss(squared, hand(), label_smoothing=0.1)
  assert pair_loss_spec(squared).needs_reference
  spec = PairLossSpec(squared, needs_reference=False)
  assert pair_loss_spec(spec) is spec
  close(
    pair_loss(spec, hand()).metrics["rewards/chosen"], 0.1 * np.asarray(hand().chosen)
  )


def test_a_function_may_add_metrics_and_take_no_options():
  def plain(scores):
    return PairLoss(-scores.chosen, {"mine": scores.chosen_tokens})

  got = pair_loss(plain, hand(extra=[0.0]))
  close(got.values, [10 - 2 * LN3, 7, 0])
  close(got.metrics["mine"], [2, 5, 0])


# Refusals


@pytest.mark.parametrize(
  ("name", "options", "match"),
  [
    ("dpo", {}, r"unknown pair loss 'dpo': use one of \['sigmoid', 'hinge'"),
    ("sigmoid", {"beta": 0.0}, r"beta=0\.0 must be positive"),
    ("orpo", {"beta": math.nan}, r"beta=nan must be positive"),
    ("sigmoid", {"gamma": 1.0}, r"sigmoid takes no gamma.*\['label_smoothing'\]"),
    ("hinge", {"label_smoothing": 0.1}, r"hinge takes no label_smoothing.*\[\]"),
    ("sigmoid", {"label_smoothing": 0.5}, r"label_smoothing=0\.5; expected"),
    ("robust", {"label_smoothing": -0.1}, r"label_smoothing=-0\.1; expected"),
    ("exo_pair", {}, r"label_smoothing=0\.0 must be in \(0, 0\.5\).*1e-3"),
    ("discopop", {"tau": 0.0}, r"tau=0\.0 must be positive"),
    ("simpo", {"gamma": -1.0}, r"gamma=-1\.0 must be >= 0"),
    ("cpo", {"cpo_alpha": -1.0}, r"cpo_alpha=-1\.0 must be >= 0"),
    ("orpo", {"lambda_orpo": 0.0}, r"lambda_orpo=0\.0 must be positive"),
  ],
)
def test_what_is_refused(name, options, match):
  with pytest.raises(ValueError, match=match):
    pair_loss(name, hand(), **options)
  with pytest.raises(ValueError, match=match):
    check_pair_loss(name, **options)


def test_what_is_no_loss():
  with pytest.raises(TypeError, match=r"a name or a function, not int"):
    pair_loss_spec(3)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_accepted_at_construction(name):
  check_pair_loss(name, **NEEDED.get(name, {}))
