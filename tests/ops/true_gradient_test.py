"""Every estimator's expectation, over all completions of a toy policy.

A policy-gradient estimator is right if its expectation is the gradient of the expected
reward, computed here by differentiating the sum over all completions. Where it is not,
the bias that theory gives is asserted. Losses are minimized: gradients are negative.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.toy_policy import Toy
from tunix.ops import importance, policy_gradient as pg
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
    level: lambda logps, mask, a, level=level: (
      pg.clipped_loss(pg.log_ratio(logps, None, mask, level), a, dual_clip=3.0).values
    )
    for level in pg.LEVELS
  },
  "sapo": lambda logps, mask, a: (
    pg.sapo_loss(pg.log_ratio(logps, None, mask), a).values
  ),
  "cispo": lambda logps, mask, a: (
    pg.cispo_loss(pg.log_ratio(logps, None, mask), logps, a).values
  ),
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


def worth(p, size):
  """How much being right counts in a group of rewards 0 and 1 with success rate p.

  With k of the others right, right instead of wrong is an advantage of a(k + 1, right)
  - a(k, wrong); k is binomial.
  """

  def advantage(right, reward):
    rewards = np.array([1.0] * right + [0.0] * (size - right))
    return (reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)

  chance = [1.0]
  for _ in range(size - 1):
    chance = np.convolve(chance, [1 - p, p])
  return sum(
    c * (advantage(k + 1, 1.0) - advantage(k, 0.0)) for k, c in enumerate(chance)
  )


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("rewards", [[1, 1, 1, 1, 0], [0, 0, 1, 0, 0]])
def test_dividing_by_the_deviation_weighs_by_difficulty(size, rewards):
  toy = Toy(length=1, eos=False)
  toy.rewards = np.array(rewards, float)

  def losses(logps, group):
    advantages = ADVANTAGES["group_normalized"](jnp.asarray(toy.rewards)[group][None])
    return mean(pg.reinforce_loss(logps, advantages[0]), jnp.ones((size, 1)))[None]

  p = float(toy.expected_reward(toy.logits))
  got = toy.expected_gradients(losses, size)[0]
  close(got, -worth(p, size) * toy.gradient(toy.expected_reward))


def test_the_weight_of_a_prompt_depends_on_its_difficulty_from_four_on():
  rates = np.linspace(0.05, 0.95, 7)
  for size, constant in ((2, 2**-0.5), (3, 2 * 3**-0.5)):
    np.testing.assert_allclose([worth(p, size) for p in rates], constant, rtol=1e-5)
  for size in (4, 8, 16):  # toward 1 / sqrt(p (1 - p))
    weights = [worth(p, size) for p in rates]
    assert weights[0] > 1.04 * weights[3] and weights[-1] > 1.04 * weights[3]
  np.testing.assert_allclose(worth(0.3, 400), (0.3 * 0.7) ** -0.5, rtol=1e-2)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_maxrl_climbs_the_first_terms_of_the_likelihood(size):
  # log p = -sum over k of (1 - p)^k / k; a group of G members has the first G - 1.
  toy = Toy(length=1, eos=False)
  toy.rewards = np.array([0.0, 0, 1, 0, 1])

  def losses(logps, group):
    rewards = jnp.asarray(toy.rewards)[group][None]
    advantages = ADVANTAGES["mean_normalized"](rewards)[0]
    return mean(pg.reinforce_loss(logps, advantages), jnp.ones((size, 1)))[None]

  def likelihood(logits):
    p = toy.expected_reward(logits)
    return -sum((1 - p) ** k / k for k in range(1, size))

  close(toy.expected_gradients(losses, size)[0], -toy.gradient(likelihood))


@pytest.mark.parametrize("name", ["batch_normalized", "batch_scaled"])
def test_statistics_of_the_batch(name):
  # Two prompts of two completions; the second prompt's rewards are shifted and wide.
  toy = Toy(length=1, eos=False)
  by_prompt = np.stack([toy.rewards, 3 * toy.rewards[::-1] - 2])

  def rewards_of(xp, group):
    return xp.stack([by_prompt[0][group[:2]], by_prompt[1][group[2:]]])

  def losses(logps, group):
    tables = jnp.asarray(by_prompt)
    rewards = jnp.stack([tables[0][group[:2]], tables[1][group[2:]]])
    advantages = ADVANTAGES[name](rewards).ravel()
    return mean(pg.reinforce_loss(logps, advantages), jnp.ones((4, 1)))[None]

  p, scores = np.asarray(toy.probability(toy.logits)), toy.scores(toy.logits)
  want = 0.0
  for group in toy.groups(4):
    rewards = rewards_of(np, group)
    center = rewards.mean() if name == "batch_normalized" else rewards.mean(1)[:, None]
    advantages = (rewards - center) / (rewards.std(ddof=1) + 1e-6)
    want -= p[group].prod() * advantages.ravel() @ scores[group] / 4
  close(toy.expected_gradients(losses, 4)[0], want)


# Off-policy: completions come from another policy.


def rewards_and_rivals(toy, group):
  rewards = jnp.asarray(toy.rewards)[group]
  return ADVANTAGES["leave_one_out"](rewards[None])[0], jnp.asarray(toy.mask)[group]


def test_the_ratio_of_whole_completions_corrects_exactly(toy):
  other = toy.logps(jnp.asarray(toy.others))

  def losses(logps, group):
    advantages, mask = rewards_and_rivals(toy, group)
    ratio = pg.log_ratio(logps, other[group], mask, "sequence-product")
    wide = pg.clipped_loss(ratio, advantages, clip_low=1.0, clip_high=1e12)
    weights = importance.truncated(
      *(logps, other[group], mask), level="sequence-product", cap=1e12
    )
    tight = importance.truncated(
      *(logps, other[group], mask), level="sequence-product", cap=1.5
    )
    plain = pg.reinforce_loss(logps, advantages)
    return jnp.stack(
      [
        mean(wide.values, mask, "sequence-mean-token-mean"),
        mean(weights * plain, mask),
        mean(tight * plain, mask),
      ]
    )

  ratio, weighted, bounded = toy.expected_gradients(losses, 2, toy.others)
  true = -toy.gradient(toy.expected_reward)
  close(ratio, true)
  close(weighted, true)
  # Truncation: what the other policy draws too rarely by more than the cap is missing.
  p, q = (np.asarray(toy.probability(x)) for x in (toy.logits, toy.others))
  drawn = np.minimum(p, 1.5 * q)
  centered = toy.rewards - q @ toy.rewards
  close(bounded, -(drawn * centered) @ toy.scores(toy.logits))
  assert np.linalg.norm(bounded - true) > 0.05 * np.linalg.norm(true)


def test_the_ratio_of_tokens_has_the_other_policys_prefixes(toy):
  # PPO's surrogate: prefixes and what follows a token are the other policy's, only the
  # token itself is weighed.
  other = toy.logps(jnp.asarray(toy.others))

  def losses(logps, group):
    mask, rewards = jnp.asarray(toy.mask)[group], jnp.asarray(toy.rewards)[group]
    ratio = pg.log_ratio(logps, other[group], mask)
    wide = pg.clipped_loss(ratio, rewards, clip_low=1.0, clip_high=1e12)
    return mean(wide.values, mask)[None]

  q = np.asarray(toy.probability(toy.others))
  worth = np.zeros(toy.logits.shape)  # q(prefix, token) times the reward to come
  weights = (q * toy.rewards)[:, None] * toy.mask
  np.add.at(worth, (toy.prefixes, toy.tokens), weights)

  def surrogate(logits):
    gap = jax.nn.log_softmax(logits) - jax.nn.log_softmax(toy.others)
    return jnp.sum(jnp.exp(gap) * worth)

  got = toy.expected_gradients(losses, 1, toy.others)[0]
  close(got, -toy.gradient(surrogate))
  assert angle(got, -toy.gradient(toy.expected_reward)) > 1e-3


# A critic.


def value_table(toy):
  """The true value of every prefix."""
  p = np.asarray(toy.probability(toy.logits))
  worth, visits = np.zeros(len(toy.logits)), toy.visits(toy.logits)
  np.add.at(worth, toy.prefixes, (p * toy.rewards)[:, None] * toy.mask)
  return worth / visits


@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("right", [True, False])
def test_gae_is_unbiased_with_the_right_critic_or_without_its_word(toy, lam, right):
  table = value_table(toy) if right else np.arange(len(toy.logits)) % 3 - 1.0
  last = np.arange(3) == toy.lengths[:, None] - 1
  rewards = jnp.asarray(toy.rewards[:, None] * last)

  def losses(logps, group):
    mask = jnp.asarray(toy.mask)[group]
    values = jnp.asarray(table[toy.prefixes])[group]
    advantages, _ = gae(rewards[group], values, mask, gamma=1.0, lam=lam)
    ratio = pg.log_ratio(logps, None, mask)
    return mean(pg.clipped_loss(ratio, advantages).values, mask)[None]

  got = toy.expected_gradients(losses, 1)[0]
  true = -toy.gradient(toy.expected_reward)
  if right or lam == 1.0:
    close(got, true)
  else:
    assert angle(got, true) > 1e-3
