import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix.ops.policy_gradient import (
  LEVELS,
  cispo_loss,
  clipped_loss,
  dppo_loss,
  log_ratio,
  reinforce_loss,
  sapo_loss,
  value_loss,
)
from tunix.ops.reductions import aggregate

MASK = jnp.array([[1, 1, 0], [1, 1, 1], [0, 0, 0]])
RNG = np.random.default_rng(0)
LOGPS, OLD = jnp.array(RNG.normal(size=(2, 3, 3)) * 0.3 - 1.0, jnp.float32)


def close(got, want, tolerance=1e-6):
  np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def logs(*rows):
  return jnp.log(jnp.array(rows))


# log_ratio


def test_levels_by_hand():
  # Ratios 2, 8 (and a masked 5): geometric mean 4, product 16.
  logps, old = logs([0.2, 0.8, 0.5]), logs([0.1, 0.1, 0.1])
  mask = jnp.array([[1, 1, 0]])
  ratios = lambda level: jnp.exp(log_ratio(logps, old, mask, level))
  close(ratios("token"), [[2, 8, 1]], 1e-5)
  close(ratios("sequence"), [[4, 4, 1]], 1e-5)
  close(ratios("sequence-product"), [[16, 16, 1]], 1e-5)
  close(log_ratio(logps, old, mask), log_ratio(logps, old, mask, "token"))


def test_gradients_of_levels_by_hand():
  # d of sum_t c_t log_ratio_t with c = (1, 10): the token's own coefficient, also in
  # the token form of the sequence; for the product both tokens get the sum.
  coefficients = jnp.array([[1.0, 10.0, 100.0]])
  mask = jnp.array([[1, 1, 0]])

  def gradient(level):
    fn = lambda x: jnp.sum(coefficients * log_ratio(x, OLD[:1], mask, level))
    return jax.jit(jax.grad(fn))(LOGPS[:1])

  close(gradient("token"), [[1, 10, 0]])
  close(gradient("sequence"), [[1, 10, 0]])
  close(gradient("sequence-product"), [[11, 11, 0]])


def test_gradient_of_the_sequence_level_is_the_papers():
  # GSPO: mean over sequences of s_i A_i with s_i = exp(mean_t log ratio).
  advantages = jnp.array([1.5, -0.5])

  def paper(logps):
    total = 0.0
    for row, n in ((0, 2), (1, 3)):
      s = jnp.exp(jnp.sum((logps[row] - OLD[row])[:n]) / n)
      total += -s * advantages[row]
    return total / 2

  def ours(logps):
    ratio = log_ratio(logps[:2], OLD[:2], MASK[:2], "sequence")
    loss = clipped_loss(ratio, advantages, clip_low=1.0, clip_high=10.0)
    return aggregate(loss.values, MASK[:2], "sequence-mean-token-mean").mean()

  want, got = (
    jax.jit(jax.value_and_grad(paper))(LOGPS),
    jax.jit(jax.value_and_grad(ours))(LOGPS),
  )
  close(got[0], want[0])
  close(got[1], want[1])


@pytest.mark.parametrize("level", LEVELS)
def test_masked_nan_is_harmless(level):
  off = MASK == 0
  fn = lambda x, old: jnp.sum(jnp.exp(log_ratio(x, old, MASK, level)))
  want = jax.jit(jax.value_and_grad(fn))(LOGPS, OLD)
  nan = lambda x: jnp.where(off, jnp.nan, x)
  got = jax.jit(jax.value_and_grad(fn))(nan(LOGPS), nan(OLD))
  assert float(got[0]) == float(want[0])
  np.testing.assert_array_equal(got[1], want[1])
  np.testing.assert_array_equal(got[1][off], 0.0)


@pytest.mark.parametrize("level", LEVELS)
def test_on_policy_ratio_is_exactly_one(level):
  got = log_ratio(LOGPS, None, MASK, level)
  np.testing.assert_array_equal(got, np.zeros((3, 3)))
  np.testing.assert_array_equal(log_ratio(LOGPS, LOGPS, MASK, level), got)
  fn = lambda old: jax.jit(jax.grad(lambda x: log_ratio(x, old(x), MASK, level).sum()))(
    LOGPS
  )
  np.testing.assert_array_equal(fn(lambda x: None), fn(lambda x: LOGPS))
  # No gradient through the old policy, even when it is computed from the same x.
  np.testing.assert_array_equal(fn(lambda x: x), fn(lambda x: None))
  assert np.abs(fn(lambda x: None)).sum() > 0


@pytest.mark.parametrize("level", LEVELS)
def test_rows_do_not_mix_and_jit_equals_eager(level):
  got = log_ratio(LOGPS, OLD, MASK, level)
  close(log_ratio(LOGPS[1:2], OLD[1:2], MASK[1:2], level), got[1:2])
  close(jax.jit(log_ratio, static_argnums=3)(LOGPS, OLD, MASK, level), got)
  np.testing.assert_array_equal(got[2], np.zeros(3))  # a row of nothing


@pytest.mark.parametrize("level", LEVELS)
def test_shorter_rows_equal_masked_ones(level):
  got = log_ratio(LOGPS[:1], OLD[:1], MASK[:1], level)
  close(log_ratio(LOGPS[:1, :2], OLD[:1, :2], MASK[:1, :2], level), got[:, :2])


def test_unknown_level():
  with pytest.raises(ValueError, match=r"unknown level 'batch'.*sequence-product"):
    log_ratio(LOGPS, OLD, MASK, "batch")


# clipped_loss

# Ratios below, in and above [0.8, 1.2], and far above.
RATIOS = logs([0.5, 1.1, 1.5, 4.0])


def test_clipped_loss_by_hand():
  got = clipped_loss(RATIOS, jnp.array([2.0]))
  close(got.values, [[-1.0, -2.2, -2.4, -2.4]])
  np.testing.assert_array_equal(got.clipped, [[False, False, True, True]])
  got = clipped_loss(RATIOS, jnp.array([-2.0]))
  close(got.values, [[1.6, 2.2, 3.0, 8.0]])
  np.testing.assert_array_equal(got.clipped, [[True, False, False, False]])


def test_bounds_by_hand():
  good = clipped_loss(RATIOS, jnp.array([2.0]), clip_low=0.6, clip_high=0.6)
  close(good.values, [[-1.0, -2.2, -3.0, -3.2]])
  bad = clipped_loss(RATIOS, jnp.array([-2.0]), clip_low=0.6, clip_high=0.6)
  close(bad.values, [[1.0, 2.2, 3.0, 8.0]])
  np.testing.assert_array_equal(bad.clipped, np.zeros((1, 4)))


def test_dual_clip_by_hand():
  bad = clipped_loss(RATIOS, jnp.array([-2.0]), dual_clip=3.0)
  close(bad.values, [[1.6, 2.2, 3.0, 6.0]])
  np.testing.assert_array_equal(bad.clipped, [[True, False, False, True]])
  good = clipped_loss(RATIOS, jnp.array([2.0]), dual_clip=3.0)
  close(good.values, clipped_loss(RATIOS, jnp.array([2.0])).values)


@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_no_gradient_where_clipped(dual_clip, advantage):
  fn = lambda x: clipped_loss(x, jnp.array([advantage]), dual_clip=dual_clip)
  gradient = jax.jit(jax.grad(lambda x: fn(x).values.sum()))(RATIOS)
  want = np.where(fn(RATIOS).clipped, 0.0, -advantage * np.exp(RATIOS))
  close(gradient, want, 1e-5)


def test_equals_the_minimum_of_the_paper():
  ratios = jnp.array(RNG.normal(size=(6, 9)))
  advantages = jnp.array(RNG.normal(size=(6, 9)))
  got = clipped_loss(ratios, advantages, clip_low=0.1, clip_high=0.3).values
  w = np.exp(ratios)
  want = -np.minimum(w * advantages, np.clip(w, 0.9, 1.3) * advantages)
  close(got, want, 1e-5)


def test_gradient_is_the_slope():
  # Ratios away from the corners at 0.8 and 1.2.
  x, advantages = logs([0.5, 0.9, 1.1, 1.6]), jnp.array([[1.0, -2.0, 3.0, -1.0]])
  fn = lambda x: clipped_loss(x, advantages).values.sum()
  gradient, h = jax.jit(jax.grad(fn))(x), 1e-2
  for i in range(4):
    step = jnp.zeros((1, 4)).at[0, i].set(h)
    close((fn(x + step) - fn(x - step)) / (2 * h), gradient[0, i], 1e-3)


def test_no_advantage_no_loss_and_nothing_clipped():
  got = clipped_loss(RATIOS, jnp.array([0.0]))
  np.testing.assert_array_equal(got.values, np.zeros((1, 4)))
  assert not got.clipped.any()


def test_vast_ratios_stay_finite():
  x, advantages = jnp.array([[-1e3, 1e3]]), jnp.array([-1.0])
  value, gradient = jax.jit(
    jax.value_and_grad(lambda x: clipped_loss(x, advantages).values.sum())
  )(x)
  assert np.isfinite(value) and np.isfinite(gradient).all()


@pytest.mark.parametrize(
  ("options", "match"),
  [
    ({"clip_low": -0.1}, r"clip_low=-0\.1 must be in \[0, 1\]"),
    ({"clip_low": 1.1}, r"clip_low=1\.1 must be in \[0, 1\]"),
    ({"clip_high": -0.1}, r"clip_high=-0\.1 >= 0"),
    ({"dual_clip": 1.2}, r"dual_clip=1\.2 must be above 1 \+ clip_high"),
  ],
)
def test_bounds_are_checked(options, match):
  with pytest.raises(ValueError, match=match):
    clipped_loss(RATIOS, jnp.array([1.0]), **options)
  if "dual_clip" not in options:
    with pytest.raises(ValueError, match=match):
      cispo_loss(RATIOS, RATIOS, jnp.array([1.0]), **options)


# The other losses


def test_reinforce_by_hand():
  logps = jnp.array([[-1.0, -2.0], [-3.0, -4.0]])
  close(reinforce_loss(logps, jnp.array([2.0, -1.0])), [[2, 4], [-3, -4]])
  by_token = jnp.array([[1.0, 2.0], [3.0, 4.0]])
  close(reinforce_loss(logps, by_token), [[1, 4], [9, 16]])


@pytest.mark.parametrize(
  "loss",
  [
    lambda a: reinforce_loss(LOGPS, a),
    lambda a: clipped_loss(LOGPS - OLD, a).values,
    lambda a: cispo_loss(LOGPS - OLD, LOGPS, a).values,
    lambda a: sapo_loss(LOGPS - OLD, a).values,
  ],
  ids=["reinforce", "clipped", "cispo", "sapo"],
)
def test_advantages_are_data_of_rows_or_tokens(loss):
  of_rows = jnp.arange(3.0)
  of_tokens = jnp.tile(of_rows[:, None], 3)
  close(loss(of_rows), loss(of_tokens))
  for advantages in (of_rows, of_tokens):
    gradient = jax.jit(jax.grad(lambda a: loss(a).sum()))(advantages)
    np.testing.assert_array_equal(gradient, np.zeros(advantages.shape))


def test_cispo_by_hand():
  logps, advantages = jnp.array([[-1.0, -2.0, -1.0, -3.0]]), jnp.array([2.0])
  fn = lambda logps, **kw: cispo_loss(RATIOS, logps, advantages, **kw)
  got = fn(logps, clip_low=0.2, clip_high=0.2)
  close(got.values, [[0.8 * 2, 1.1 * 4, 1.2 * 2, 1.2 * 6]])
  np.testing.assert_array_equal(got.clipped, [[True, False, True, True]])
  gradient = jax.jit(
    jax.grad(lambda x: fn(x, clip_low=0.2, clip_high=0.2).values.sum())
  )(logps)
  close(gradient, [[-1.6, -2.2, -2.4, -2.4]])
  # By default there is no lower bound and the upper one is 5.
  got = cispo_loss(logs([0.01, 4.9, 6.0]), jnp.full((1, 3), -1.0), jnp.array([1.0]))
  close(got.values, [[0.01, 4.9, 5.0]])
  np.testing.assert_array_equal(got.clipped, [[False, False, True]])


def test_cispo_has_no_gradient_through_its_weight():
  fn = lambda x: cispo_loss(x, LOGPS, jnp.ones(3)).values.sum()
  np.testing.assert_array_equal(jax.jit(jax.grad(fn))(LOGPS - OLD), np.zeros((3, 3)))


def test_sapo_by_hand():
  # sigmoid(0) = 1/2, and sigmoid(log 3) = 3/4. With tau = 2, 4 / tau = 2.
  ratios = logs([1.0, 1 + math.log(3) / 2, 1.0, 1 + math.log(3)])
  advantages = jnp.array([[3.0, 3.0, -1.0, -1.0]])
  got = sapo_loss(ratios, advantages, positive=2.0, negative=1.0)
  close(got.values, [[-3, -4.5, 2, 3]])
  assert not got.clipped.any()
  # The derivative in log w is -4 s (1 - s) w A, with s the sigmoid: that of -w A at 1.
  of = lambda x: sapo_loss(x, advantages, positive=2.0, negative=1.0).values.sum()
  w = 1 + math.log(3) / np.array([2, 1])
  close(jax.jit(jax.grad(of))(ratios), [[-3, -3 * 0.75 * w[0], 1, 0.75 * w[1]]])
  # An advantage of 0 counts with the second temperature, and gives 0.
  assert sapo_loss(ratios, jnp.zeros(1)).values.tolist() == [[0.0] * 4]
  for bad in ({"positive": 0.0}, {"negative": -1.0}):
    with pytest.raises(ValueError, match="expected both above 0"):
      sapo_loss(ratios, advantages, **bad)


# Probabilities under the policies that sampled and that is trained: ratios 1.4, 1.2,
# 0.6, 10, and a masked NaN. Total variations 0.2, 0.1, 0.2, 0.009.
DRAWN = logs([0.5, 0.5, 0.5, 0.001, jnp.nan])
TRAINED = logs([0.7, 0.6, 0.3, 0.01, 0.5])
FOUR = jnp.array([[1, 1, 1, 1, 0]])


def dppo(advantage, **options):
  return dppo_loss(TRAINED, DRAWN, jnp.array([advantage]), FOUR, **options)


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_by_hand(divergence):
  # KL divergences: 0.5 log(0.5 / 0.7) + 0.5 log(0.5 / 0.3) = 0.0872, and so for 0.3;
  # 0.5 log(0.5 / 0.6) + 0.5 log(0.5 / 0.4) = 0.0204; 0.001 log(0.1) +
  # 0.999 log(0.999 / 0.99) = 0.0067. The limits 0.15 and 0.05 bound the same tokens.
  options = {"divergence": divergence, "limit": {"tv": 0.15, "kl": 0.05}[divergence]}
  better = dppo(2.0, **options)
  # 1.4 moves away upwards and is dropped; 0.6 moves back, and 10 is no wide move.
  close(better.values, [[0, -2.4, -1.2, -20, 0]], 1e-5)
  assert better.clipped.tolist() == [[True, False, False, False, False]]
  worse = dppo(-1.0, **options)
  close(worse.values, [[1.4, 1.2, 0, 10, 0]], 1e-5)
  assert worse.clipped.tolist() == [[False, False, True, False, False]]
  assert not dppo(0.0, **options).clipped.any()
  for limit, dropped in (
    ((0.099, 2), (0.101, 1))
    if divergence == "tv"
    else (
      (0.0203, 2),
      (0.0205, 1),
    )
  ):
    assert dppo(1.0, divergence=divergence, limit=limit).clipped.sum() == dropped


def test_dppo_has_the_gradient_of_the_ratio_where_it_is_kept():
  of = lambda x: dppo_loss(x, DRAWN, jnp.array([1.0]), FOUR).values.sum()
  close(jax.jit(jax.grad(of))(TRAINED), [[0, -1.2, -0.6, -10, 0]], 1e-5)
  close(jax.jit(jax.grad(of))(TRAINED), jax.jit(jax.grad(of))(TRAINED))


def test_a_sure_token_has_a_finite_kl_divergence():
  sure, unsure = jnp.zeros((1, 1)), logs([0.5])
  for drawn, trained, dropped in ((sure, unsure, True), (unsure, sure, True)):
    advantage = jnp.where(trained > drawn, 1.0, -1.0)[0]
    out = dppo_loss(
      *(trained, drawn, advantage, jnp.ones((1, 1))), divergence="kl", limit=0.05
    )
    assert np.isfinite(out.values).all() and out.clipped.item() is dropped
  same = dppo_loss(sure, sure, jnp.ones(1), jnp.ones((1, 1)), divergence="kl")
  assert same.values.item() == -1.0


@pytest.mark.parametrize(
  ("options", "match"),
  [({"divergence": "js"}, "unknown divergence 'js'"), ({"limit": 0.0}, "limit=0.0")],
)
def test_dppo_is_checked(options, match):
  with pytest.raises(ValueError, match=match):
    dppo(1.0, **options)


def test_value_loss_by_hand():
  values, returns = jnp.array([[1.0, 3.0]]), jnp.array([[2.0, 0.0]])
  got = value_loss(values, returns)
  close(got.values, [[0.5, 4.5]])
  assert not got.clipped.any()
  # Old values 0 and 4, clip 1/2: near values 1/2 and 7/2, losses 9/8 and 49/8.
  got = value_loss(values, returns, jnp.array([[0.0, 4.0]]), 0.5)
  close(got.values, [[1.125, 6.125]])
  np.testing.assert_array_equal(got.clipped, [[True, True]])
  # Far from the return on the other side the plain loss is the greater one.
  got = value_loss(jnp.array([[5.0]]), jnp.array([[0.0]]), jnp.array([[1.0]]), 0.5)
  close(got.values, [[12.5]])
  assert not got.clipped.any()


def test_gradients_of_value_loss():
  values, returns, old = jnp.array([[1.0, 5.0]]), jnp.array([[2.0, 0.0]]), 0.5
  fn = lambda v, r, o: value_loss(v, r, o, 0.1).values.sum()
  gradients = jax.jit(jax.grad(fn, (0, 1, 2)))(values, returns, jnp.full((1, 2), old))
  # The first is clipped (at 0.6, worse than 1), the second is not: V - R = 5.
  close(gradients[0], [[0.0, 5.0]])
  assert not np.any(gradients[1]) and not np.any(gradients[2])


@pytest.mark.parametrize(
  ("old", "clip"), [(None, 0.5), (jnp.zeros((1, 1)), None), (jnp.zeros((1, 1)), 0.0)]
)
def test_value_clip_needs_both(old, clip):
  with pytest.raises(ValueError, match="give both"):
    value_loss(jnp.zeros((1, 1)), jnp.zeros((1, 1)), old, clip)


def chain(logps, old, advantages, mask):
  """A whole loss, as a learner would write it."""
  ratio = log_ratio(logps, old, mask)
  return aggregate(clipped_loss(ratio, advantages, dual_clip=3.0).values, mask).mean()


def test_the_chain_is_deaf_to_what_is_masked():
  advantages = jnp.array([[1.0, -1.0, 2.0]] * 3)
  args = LOGPS, OLD, advantages, MASK
  want = jax.jit(jax.value_and_grad(chain))(*args)
  nan = [jnp.where(MASK == 0, jnp.nan, x) for x in args[:3]]
  got = jax.jit(jax.value_and_grad(chain))(*nan, MASK)
  assert float(got[0]) == float(want[0]) and math.isfinite(want[0])
  np.testing.assert_array_equal(got[1], want[1])
  jitted = jax.jit(jax.value_and_grad(chain))(*args)
  close(jitted[1], want[1])
  # The last row holds nothing: without it everything is the same.
  fewer = jax.jit(jax.value_and_grad(chain))(*(x[:2] for x in args))
  close(fewer[0], want[0])
  close(fewer[1], want[1][:2])
  empty = jax.jit(jax.value_and_grad(chain))(*nan, 0 * MASK)
  assert float(empty[0]) == 0.0 and not np.any(empty[1])
