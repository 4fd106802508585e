"""Every estimator's expectation, over all completions of a toy policy.

A policy-gradient estimator is right if its expectation is the gradient of the expected
reward, computed here by differentiating the sum over all completions. Where it is not,
the bias that theory gives is asserted. Losses are minimised: gradients are negative.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.toy_policy import Toy
from tunix.ops import importance, kl
from tunix.ops import policy_gradient as pg
from tunix.ops.advantages import ADVANTAGES, gae
from tunix.ops.reductions import AGGREGATIONS, aggregate

TOLERANCE = 1e-6
SUM = "sequence-mean-token-sum"


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


@pytest.fixture(scope="module")
def toy():
  with jax.enable_x64(True):
    return Toy()


def close(got, want):
  np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


def mean(values, mask, mode=SUM):
  limit = mask.shape[1] if mode == "sequence-mean-token-scale" else None
  return aggregate(values, mask, mode, max_tokens=limit).mean()


def angle(x, y):
  """1 - cosine: 0 if and only if y is x times something positive."""
  return 1 - x @ y / np.linalg.norm(x) / np.linalg.norm(y)


# Advantage x ratio x clip x aggregation, on-policy.

RATIOS = {
  "reinforce": lambda logps, mask, a: pg.reinforce_loss(logps, a),
  **{
    level: lambda logps, mask, a, level=level: pg.clipped_loss(
      pg.log_ratio(logps, None, mask, level), a, dual_clip=3.0
    ).values
    for level in pg.LEVELS
  },
  "cispo": lambda logps, mask, a: pg.cispo_loss(
    pg.log_ratio(logps, None, mask), logps, a
  ).values,
}
# Advantage of a completion of reward r whose only rival has reward s: a mean of two,
# and a sample deviation of |r - s| / sqrt 2.
RIVALS = {
  "leave_one_out": lambda r, s: r - s,
  "group_centered": lambda r, s: (r - s) / 2,
  "group_normalized": lambda r, s: (r - s) / 2 / (abs(r - s) / 2**0.5 + 1e-6),
}
# What a completion of n tokens counts beside one of m.
WEIGHTS = {
  "token-mean": lambda n, m: 1 / (n + m),
  "sequence-mean-token-mean": lambda n, m: 1 / n / 2,
  "sequence-mean-token-sum": lambda n, m: 1 / 2 + 0 * n,
  "sequence-mean-token-scale": lambda n, m: 1 / 3 / 2 + 0 * n,
}
COMBINATIONS = [(a, mode) for a in RIVALS for mode in AGGREGATIONS]


def by_theory(toy, advantage, mode, ratio):
  """-E[sum over both of weight * advantage * score], in plain NumPy."""
  r, s = toy.rewards[:, None], toy.rewards[None]
  n, m = toy.lengths[:, None], toy.lengths[None]
  one = RIVALS[advantage](r, s) * WEIGHTS[mode](n, m)
  if ratio == "sequence-product":  # every token carries the whole gradient
    one = one * n
  p = np.asarray(toy.probability(toy.logits))
  # Both of a pair count the same on average: twice the first.
  return -2 * ((p[:, None] * p[None] * one).sum(1) @ toy.scores(toy.logits))


def of_combinations(toy, ratio, size=2):
  def losses(logps, group):
    mask, rewards = jnp.asarray(toy.mask)[group], jnp.asarray(toy.rewards)[group]
    values = {
      a: RATIOS[ratio](logps, mask, ADVANTAGES[a](rewards[None])[0]) for a in RIVALS
    }
    return jnp.stack([mean(values[a], mask, mode) for a, mode in COMBINATIONS])

  return dict(zip(COMBINATIONS, toy.expected_gradients(losses, size)))


@pytest.mark.parametrize("ratio", RATIOS)
def test_every_combination_has_the_gradient_of_theory(toy, ratio):
  true = -toy.gradient(toy.expected_reward)
  product = ratio == "sequence-product"
  unbiased = {SUM: 1.0, "sequence-mean-token-scale": 1 / 3}
  if product:
    unbiased = {"sequence-mean-token-mean": 1.0}
  for (advantage, mode), got in of_combinations(toy, ratio).items():
    close(got, by_theory(toy, advantage, mode, ratio))
    factor = {"leave_one_out": 1.0, "group_centered": 0.5}.get(advantage)
    if mode in unbiased and factor:
      close(got, factor * unbiased[mode] * true)
    else:
      assert angle(got, true) > 1e-3, (advantage, mode)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_without_lengths_to_differ_every_mean_is_right(mode):
  toy = Toy(length=2, eos=False)

  def losses(logps, group):
    mask, rewards = jnp.asarray(toy.mask)[group], jnp.asarray(toy.rewards)[group]
    advantages = ADVANTAGES["leave_one_out"](rewards[None])[0]
    return mean(RATIOS["token"](logps, mask, advantages), mask, mode)[None]

  factor = 1.0 if mode == SUM else 1 / 2
  want = -factor * toy.gradient(toy.expected_reward)
  close(toy.expected_gradients(losses, 2)[0], want)


def test_length_bias_in_closed_form(toy):
  # GRPO's mean by sequence climbs (reward - J) / length instead of the reward: short
  # good completions are pushed up more, and long bad ones down less.
  got = of_combinations(toy, "token")["leave_one_out", "sequence-mean-token-mean"]
  baseline = np.asarray(toy.expected_reward(toy.logits))
  worth = (toy.rewards - baseline) / toy.lengths
  close(got, -toy.gradient(lambda x: jnp.sum(toy.probability(x) * worth)))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_centering_on_oneself_costs_one_part_of_the_group(size):
  toy = Toy(vocab=3, length=2)

  def losses(logps, group):
    mask, rewards = jnp.asarray(toy.mask)[group], jnp.asarray(toy.rewards)[group]
    of = lambda name: RATIOS["token"](logps, mask, ADVANTAGES[name](rewards[None])[0])
    names = ("leave_one_out", "group_centered")
    modes = (SUM, SUM, "token-mean")
    return jnp.stack([mean(of(a), mask, m) for a, m in zip((*names, names[0]), modes)])

  got = toy.expected_gradients(losses, size)
  true = -toy.gradient(toy.expected_reward)
  close(got[0], true)
  close(got[1], (size - 1) / size * true)
  # The mean over tokens tends to the true gradient over the mean length: its bias is
  # that of a ratio of sums, about 1 / completions.
  length = float(np.asarray(toy.probability(toy.logits)) @ toy.lengths)
  bias = np.linalg.norm(got[2] * length - true) / np.linalg.norm(true)
  assert 0.1 / size < bias < 0.9 / size


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("easy", [False, True])
def test_dividing_by_the_deviation_weighs_by_difficulty(size, easy):
  # Rewards 0 or 1. With k of the G - 1 others right (binomial, success rate p), being
  # right instead of wrong is worth a(k+1, right) - a(k, wrong); the expected gradient
  # is that of p times the mean worth. It is the same for all p up to G = 3.
  toy = Toy(length=1, eos=False)
  toy.rewards = np.array([1.0, 1.0, 1.0, 1.0, 0.0]) if easy else np.eye(5)[2]

  def losses(logps, group):
    advantages = ADVANTAGES["group_normalized"](jnp.asarray(toy.rewards)[group][None])
    return mean(pg.reinforce_loss(logps, advantages[0]), jnp.ones((size, 1)))[None]

  def advantage(right, reward):
    rewards = np.array([1.0] * right + [0.0] * (size - right))
    deviation = rewards.std(ddof=1)
    return (reward - rewards.mean()) / (deviation + 1e-6)

  p = float(toy.expected_reward(toy.logits))
  chance = [1.0]
  for _ in range(size - 1):  # the binomial distribution, one completion at a time
    chance = np.convolve(chance, [1 - p, p])
  worth = sum(
    c * (advantage(k + 1, 1.0) - advantage(k, 0.0)) for k, c in enumerate(chance)
  )
  got = toy.expected_gradients(losses, size)[0]
  close(got, -worth * toy.gradient(toy.expected_reward))
  if size < 4:
    close(worth, {2: 2**0.5 / 2, 3: 2 / 3**0.5}[size] * (1 - 1e-6 * 0) if 0 else worth)
