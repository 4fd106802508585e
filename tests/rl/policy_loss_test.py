"""Losses of rollouts that another policy drew, and the metrics of their weights.

Three policies have a log-probability of every token: the one that sampled (`DRAWN`),
the trainer's before the update (`OLD`), and the trained one.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.toy_policy import Toy
from tests.rl import clusters
from tests.rl.centering_test import Table
from tunix.ops import policy_gradient
from tunix.ops.reductions import aggregate
from tunix.rl import common, metrics, policy_loss
from tunix.rl.algorithm_config import (
  AlgorithmConfig,
  RolloutCorrection,
  safe_correction,
)
from tunix.rl.grpo.grpo_learner import (
  CISPOConfig,
  GRPOConfig,
  GSPOConfig,
  SAPOConfig,
)
from tunix.rl.pipeline import PromptBatch
from tunix.rl.rollout.base_rollout import RolloutConfig, RolloutOutput
from tunix.rl.weights.policy_version import PolicyVersion

# Ratios v = old / drawn: 0.6, 3; w = trained / old: 1.5, 1.1; u = v w: 0.9, 3.3.
DRAWN = jnp.log(jnp.array([[0.4, 0.1]]))
OLD = jnp.log(jnp.array([[0.24, 0.3]]))
LOGPS = jnp.log(jnp.array([[0.36, 0.33]]))
MASK, GOOD = jnp.ones((1, 2)), jnp.array([2.0])
KINDS = ("decoupled", "truncate", "mask", "cispo", "dppo-tv", "dppo-kl")
WEIGHTS = KINDS[:3]


def config(kind: str | None = None, **options: Any):
  rule = None if kind is None else RolloutCorrection(kind=kind, **options)
  return AlgorithmConfig(beta=0.0, rollout_correction=rule)


def losses(
  settings, logps=LOGPS, old=OLD, drawn: Any = DRAWN, advantages=GOOD, mask=MASK
):
  loss, _ = policy_loss.corrected_surrogate(
    logps, old, drawn, advantages, mask, settings
  )
  return loss.values


def gradient(settings, logps=LOGPS, **arrays: Any):
  return jax.jit(jax.grad(lambda x: losses(settings, x, **arrays).sum()))(logps)


def close(got, want, tolerance=1e-5):
  np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


# (kind, options) -> weight on the advantage of 2, and its derivative by the
# log-probabilities. The clipped ratios min(w, 1.2) are 1.2, without a gradient, and
# 1.1.
HAND = [
  ("decoupled", {}, (0.6 * 1.2, 3 * 1.1), (0, 3 * 1.1)),
  ("decoupled", {"level": "sequence"}, 1.8**0.5 * np.array([1.2, 1.1]), None),
  ("decoupled", {"level": "sequence-product"}, 1.8 * np.array([1.2, 1.1]), None),
  ("truncate", {}, (0.6 * 1.2, 2 * 1.1), (0, 2 * 1.1)),
  ("truncate", {"high": 1.4, "level": "sequence-product"}, (1.4 * 1.2, 1.54), None),
  ("mask", {}, (0.6 * 1.2, 0), (0, 0)),
  ("mask", {"high": 5.0}, (0.6 * 1.2, 3.3), (0, 3.3)),  # IcePop
  ("mask", {"level": "sequence", "high": 1.2}, (0, 0), (0, 0)),
  ("cispo", {}, np.array([0.9, 3.3]) * LOGPS[0], (0.9, 3.3)),
  ("cispo", {"low": 0.95, "high": 3.0}, np.array([0.95, 3.0]) * LOGPS[0], (0.95, 3)),
  # Probabilities 0.4 to 0.36, which moves back, and 0.1 to 0.33: TV 0.23, KL 0.145.
  ("dppo-tv", {}, (0.9, 0), (0.9, 0)),
  ("dppo-tv", {"threshold": 0.24}, (0.9, 3.3), (0.9, 3.3)),
  ("dppo-kl", {}, (0.9, 0), (0.9, 0)),
  ("dppo-kl", {"threshold": 0.15}, (0.9, 3.3), (0.9, 3.3)),
]


@pytest.mark.parametrize(("kind", "options", "weights", "slopes"), HAND)
def test_losses_by_hand(kind, options, weights, slopes):
  settings = config(kind, **options)
  close(losses(settings), -2 * np.array([weights]))
  if slopes is not None:
    close(gradient(settings), -2 * np.array([slopes]))


def test_the_gate_of_sapo_has_the_temperatures_of_the_settings():
  settings = SAPOConfig(positive_temperature=0.5, negative_temperature=3.0)
  of = functools.partial(policy_gradient.sapo_loss, LOGPS - OLD)
  for advantages, options in ((GOOD, {"positive": 0.5}), (-GOOD, {"negative": 3.0})):
    got = losses(settings, drawn=None, advantages=advantages)
    close(got, of(advantages, **options).values)
    assert np.abs(got - of(advantages).values).min() > 0.01


# Gradients: the sum over all completions against a loop over their tokens.


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


@pytest.fixture(scope="module")
def toy():
  with jax.enable_x64(True):
    return Toy(vocab=3, length=3)


def bernoulli_kl(p, q):
  return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def coefficient(rule, v, w, p, q, advantage):
  """The factor of A * gradient of log pi(token), from its scalars, and its bound.

  v: weight of old against drawn at the rule's level; w: ratio of trained and old; p, q:
  probabilities of the token under the policies that drew it and that is trained.
  """
  u, (low, high) = q / p, rule.bounds
  if rule.kind == "cispo":
    return min(max(u, low), high), not low < u < high
  if rule.kind.startswith("dppo"):
    far = abs(p - q) if rule.kind == "dppo-tv" else bernoulli_kl(p, q)
    away = u > 1 if advantage > 0 else u < 1
    return (0.0, True) if away and far > rule.limit else (u, False)
  clipped = w > 1.2 if advantage > 0 else w < 0.8
  slope = 0.0 if clipped else w
  if rule.kind == "truncate":
    return min(v, high) * slope, v > high
  if rule.kind == "mask":
    return (v * slope, False) if low <= v <= high else (0.0, True)
  return v * slope, clipped


RULES = [
  RolloutCorrection(kind="decoupled"),
  RolloutCorrection(kind="decoupled", level="sequence-product"),
  RolloutCorrection(kind="truncate", high=1.1),
  RolloutCorrection(kind="truncate", high=1.1, level="sequence-product"),
  RolloutCorrection(kind="mask", low=0.8, high=1.2),
  RolloutCorrection(kind="mask", low=0.8, high=1.2, level="sequence"),
  RolloutCorrection(kind="cispo", low=0.5, high=1.5),
  RolloutCorrection(kind="dppo-tv", threshold=0.1),
  RolloutCorrection(kind="dppo-kl", threshold=0.02),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.kind}-{r.level}")
def test_expected_gradients_by_enumeration(toy, rule):
  near = toy.others + 0.5 * (toy.logits - toy.others)
  drawn, old = toy.logps(jnp.asarray(toy.others)), toy.logps(jnp.asarray(near))
  settings = AlgorithmConfig(beta=0.0, rollout_correction=rule)
  centered = jnp.asarray(toy.rewards - toy.rewards.mean())

  def loss(logps, row):
    mask = jnp.asarray(toy.mask)[row]
    values = losses(settings, logps, old[row], drawn[row], centered[row], mask)
    return aggregate(values, mask, "sequence-mean-token-sum").mean()[None]

  got = toy.expected_gradients(loss, 1, toy.others)[0]
  now = np.asarray(toy.logps(jnp.asarray(toy.logits)))
  scores = jax.jacrev(toy.logps)(jnp.asarray(toy.logits)).reshape(*now.shape, -1)
  drawn, old, want, bounded = np.asarray(drawn), np.asarray(old), 0.0, set()
  for i, n in enumerate(toy.lengths):
    gaps = (old - drawn)[i, :n]
    row = {"sequence": gaps.mean(), "sequence-product": gaps.sum()}
    chance = math.exp(drawn[i, :n].sum())
    for t in range(n):
      factor, is_bounded = coefficient(
        rule,
        math.exp(row.get(rule.level, gaps[t])),
        math.exp(now[i, t] - old[i, t]),
        math.exp(drawn[i, t]),
        math.exp(now[i, t]),
        float(centered[i]),
      )
      bounded.add(is_bounded)
      want -= chance * factor * float(centered[i]) * np.asarray(scores[i, t])
  assert bounded == {True, False}
  close(got, want, 1e-7)


def test_the_weights_of_whole_completions_are_exact_without_bounds(toy):
  # The policy before the update is the trained one: a single update.
  drawn = toy.logps(jnp.asarray(toy.others))
  rule = RolloutCorrection(kind="decoupled", level="sequence-product")
  settings = AlgorithmConfig(beta=0.0, rollout_correction=rule)

  def loss(logps, row):
    mask, rewards = jnp.asarray(toy.mask)[row], jnp.asarray(toy.rewards)[row]
    old = jax.lax.stop_gradient(logps)
    values = losses(settings, logps, old, drawn[row], rewards, mask)
    return aggregate(values, mask, "sequence-mean-token-sum").mean()[None]

  got = toy.expected_gradients(loss, 1, toy.others)[0]
  close(got, -toy.gradient(toy.expected_reward), 1e-7)


def test_a_single_update_with_truncated_weights_is_cispo():
  truncated, cispo = config("truncate", high=1.5), config("cispo", high=1.5)
  arrays = {"old": LOGPS, "advantages": -GOOD}
  close(gradient(truncated, **arrays), gradient(cispo, **arrays))
  assert np.abs(gradient(cispo, **arrays)).max() == 3.0  # the bound times A


# Limits, padding, metrics.


@pytest.mark.parametrize("kind", KINDS)
def test_policies_that_agree_change_no_byte(kind):
  arrays = {"old": LOGPS, "drawn": LOGPS}
  algo = "cispo" if kind == "cispo" else "grpo"
  plain = AlgorithmConfig(beta=0.0, loss_algo=algo)
  of = lambda settings: jax.jit(
    jax.value_and_grad(lambda x: losses(settings, x, **arrays).sum())
  )(LOGPS)
  for got, want in zip(of(config(kind)), of(plain)):
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_masked_tokens_never_count(kind):
  nan = jnp.full((1, 1), jnp.nan)
  wide = lambda x: jnp.concatenate([nan, x, nan], axis=1)
  arrays = {"old": wide(OLD), "drawn": wide(DRAWN), "mask": jnp.array([[0, 1, 1, 0.0]])}
  settings = config(kind)
  close(losses(settings, wide(LOGPS), **arrays)[:, 1:3], losses(settings))
  slopes = jax.jit(
    jax.grad(lambda x: aggregate(losses(settings, x, **arrays), arrays["mask"]).total)
  )(wide(LOGPS))
  close(slopes, jnp.pad(gradient(settings), ((0, 0), (1, 1))))
  _, shown = policy_loss.corrected_surrogate(
    wide(LOGPS), arrays["old"], arrays["drawn"], GOOD, arrays["mask"], settings
  )
  _, plain = policy_loss.corrected_surrogate(LOGPS, OLD, DRAWN, GOOD, MASK, settings)
  for name, mean in policy_loss.token_means(plain, MASK).items():
    padded = policy_loss.token_means(shown, arrays["mask"])[name]
    close(padded.mean(), mean.mean())


def shown(kind, **options):
  _, watched = policy_loss.corrected_surrogate(
    LOGPS, OLD, DRAWN, GOOD, MASK, config(kind, **options)
  )
  sums = policy_loss.token_means(watched, MASK)
  return policy_loss.derived({name: x.mean() for name, x in sums.items()})


def test_metrics_by_hand():
  plain = shown(None)
  # k3 of KL(drawn, old): r - 1 - log r of the ratios 0.6 and 3.
  close(plain["parity/kl"], (0.6 - 1 - math.log(0.6) + 3 - 1 - math.log(3)) / 2)
  close(plain["parity/ratio"], 1.8)
  assert not [name for name in plain if name.startswith("rollout_correction")]
  name = "rollout_correction/"
  cut = shown("truncate")  # weights 0.6 and 2
  close(cut[f"{name}weight"], 1.3)
  close(cut[f"{name}effective_sample_size"], 2.6**2 / (2 * 4.36))
  close(cut[f"{name}truncated"], 0.5)
  left = shown("mask")  # weights 0.6 and 0
  close(left[f"{name}effective_sample_size"], 1 / 2)
  close(left[f"{name}masked"], 0.5)
  close(shown("dppo-kl")[f"{name}weight"], 0.9 / 2)
  close(shown("cispo", high=3.0)[f"{name}truncated"], 0.5)
  close(shown("decoupled")[f"{name}weight"], 1.8)
  kinds = {kind: set(shown(kind)) for kind in KINDS}
  assert not {f"{name}masked", f"{name}truncated"} & kinds["decoupled"]
  assert not any(f"{name}mean_square" in names for names in kinds.values())


def test_staleness_by_hand():
  versions = np.array([[3, 5, 5, 0], [4, 4, 9, 0]])
  mask = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], bool)
  found = metrics.staleness(versions, mask, 6)  # ages 3, 1, 1, 2, 2
  assert found["staleness/mean"] == (9 / 5, 5)
  assert found["staleness/max"] == (3, 5)
  assert metrics.mean_of([found, metrics.staleness(versions[:1], mask[:1], 9)]) == {
    "staleness/mean": (9 + 14) / 8,
    "staleness/max": 6,
  }
  assert metrics.staleness(versions, mask & False, 6) == {}
  with pytest.raises(ValueError, match="versions has 5 and the policy has made 4"):
    metrics.staleness(versions, mask, 4)


# Settings.


def test_what_does_not_combine_is_refused():
  for options, message in (
    ({"kind": "truncate", "low": 0.5}, "low is 0.5 and kind is 'truncate'"),
    ({"kind": "decoupled", "high": 2.0}, "high is 2.0 and kind is 'decoupled'"),
    ({"kind": "mask", "threshold": 0.1}, "threshold is 0.1 and kind is 'mask'"),
    ({"kind": "dppo-tv", "high": 2.0}, "high is 2.0 and kind is 'dppo-tv'"),
    ({"kind": "cispo", "level": "sequence"}, "leave level at"),
    ({"kind": "cispo", "low": 1.5}, "low is 1.5 and high is 5.0"),
    ({"kind": "truncate", "high": 0.5}, "high is 0.5"),
    ({"kind": "icepop"}, "choose one of off, decoupled, truncate, mask, cispo"),
  ):
    with pytest.raises(ValueError, match=message):
      RolloutCorrection(**options)
  for settings, options in (
    (GSPOConfig, {}),
    (CISPOConfig, {}),
    (GRPOConfig, {"loss_algo": "reinforce"}),
  ):
    with pytest.raises(ValueError, match="takes the place of the loss, and loss_algo"):
      settings(rollout_correction=RolloutCorrection(kind="dppo-tv"), **options)
    for kind in ("off", *WEIGHTS):
      settings(rollout_correction=RolloutCorrection(kind=kind), **options)
  with pytest.raises(ValueError, match="no dual clip"):
    config_of = RolloutCorrection(kind="cispo")
    GRPOConfig(rollout_correction=config_of, epsilon_c=3.0)
  with pytest.raises(ValueError, match="no log-probabilities of the engine"):
    losses(config("truncate"), drawn=None)


def test_stale_rollouts_are_corrected_unless_a_user_says_otherwise():
  assert safe_correction(0) is None
  assert safe_correction(4) == RolloutCorrection(kind="truncate", level="token")
  assert RolloutCorrection(kind="truncate").bounds == (0.0, 2.0)
  plain = GSPOConfig()
  assert plain.for_staleness(0) == plain and plain.correction is None
  assert plain.for_staleness(2).correction == safe_correction(2)
  for kind in ("off", "mask"):
    chosen = GSPOConfig(rollout_correction=RolloutCorrection(kind=kind))
    assert chosen.for_staleness(2) == chosen
  off = GSPOConfig(rollout_correction=RolloutCorrection(kind="off"))
  assert off.correction is None
  with pytest.raises(ValueError, match="staleness is -1"):
    safe_correction(-1)


# A run.


def test_a_run_shows_staleness_and_weights_however_it_is_cut():
  def run(**training):
    rule = RolloutCorrection(kind="dppo-tv", threshold=1e-5)
    learner = clusters.grpo(
      {"rollout_correction": rule, "num_iterations": 2}, **training
    )
    clusters.stamped(learner.rl_cluster, 1)
    learner.train(clusters.prompts(2))
    learner.close()
    return {name: np.array(line.values) for name, line in learner.history.items()}

  with jax.enable_x64(False):
    whole, cut = run(), run(train_micro_batch_size=1)
  # The first batch was drawn before any update, the second after two.
  assert whole["train/staleness/mean"].tolist() == [0, 1]
  assert whole["train/staleness/max"].tolist() == [0, 1]
  name = "actor/train/rollout_correction/"
  masked = whole[f"{name}masked"]
  assert masked[1] > masked[0]  # the policy has moved
  sizes = whole[f"{name}effective_sample_size"]
  assert (sizes > 0).all() and (sizes <= 1).all() and sizes[1] < 1
  for kind in ("masked", "effective_sample_size", "weight"):
    close(cut[name + kind], whole[name + kind], 1e-4)


def test_versions_stay_with_their_rows():
  tokens = [np.arange(n, dtype=np.int32) + 2 for n in (1, 3, 2, 2)]
  out = RolloutOutput(
    text=["x"] * 4,
    tokens=tokens,
    prompt_tokens=[np.ones(2, np.int32)] * 4,
    logprobs=[np.zeros(len(row), np.float32) for row in tokens],
    finish_reasons=["stop"] * 4,
    version=PolicyVersion(step=7, stamp="x"),
  )
  assert [x.tolist() for x in out.with_versions().versions or ()] == [
    *([7], [7, 7, 7], [7, 7], [7, 7])
  ]
  out = dataclasses.replace(out, versions=[x + 10 for x in tokens])
  batch = PromptBatch(prompts=["p", "q"], columns={}, number=0)
  made = lambda out: common.rollouts_of(
    out, batch, RolloutConfig(max_tokens_to_generate=4), group_size=2, bucketed=False
  )
  rows = dataclasses.replace(made(out), scores=np.zeros((2, 2)))
  twice = common.joined([rows, rows]).take([3, 0])
  want = np.where(twice.completion_mask, twice.completion_ids + 10, 0)
  np.testing.assert_array_equal(twice.versions, want)
  assert len((out.joined([out])).versions or ()) == 8
  plain = made(dataclasses.replace(out, versions=None))
  assert plain.versions is None


@pytest.mark.parametrize(
  ("mode", "weight"), [("token-mean", 4), ("sequence-mean-token-mean", 3)]
)
def test_observations_between_actions_are_predicted(mode, weight):
  """Token 0 of row 0 is an observation; token 1 of row 2 is behind the last action."""
  logits = np.random.default_rng(0).normal(size=(4, 3))
  words = np.array([[2, 0], [1, 2], [0, 1], [1, 1]], np.int32)
  example = common.TrainExample(
    prompt_ids=np.zeros((4, 1), np.int32),
    prompt_mask=np.ones((4, 1), bool),
    completion_ids=words,
    completion_mask=np.array([[0, 1], [1, 1], [1, 0], [0, 0]], bool),
    advantages=np.array([1.0, -2.0, 0.5, 7.0]),
  )

  def loss(logits, example, observations):
    settings = GRPOConfig(
      beta=0.0, loss_agg_mode=mode, observation_weight=observations, entropy_coef=0.1
    )
    return policy_loss.policy_loss(
      Table(logits), example, settings, temperature=1.0, max_tokens=2
    )

  plain, _ = loss(logits, example, 0.0)
  total, means = loss(logits, example, 0.5)
  cross_entropy = lambda logits: -jax.nn.log_softmax(logits[0])[2]
  close(total.total - plain.total, 0.5 * cross_entropy(logits))
  assert total.weight == plain.weight == weight
  close(means["observation_loss"].mean(), cross_entropy(logits))
  slope = jax.jit(jax.grad(lambda x: loss(x, example, 0.5)[0].total))(logits)
  without = jax.jit(jax.grad(lambda x: loss(x, example, 0.0)[0].total))(logits)
  close(slope - without, 0.5 * jax.jit(jax.grad(cross_entropy))(logits))
  parts = [loss(logits, example.take(rows), 0.5)[0] for rows in ([0, 1], [2, 3])]
  close(sum(part.total for part in parts), total.total)
