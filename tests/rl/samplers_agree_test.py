"""Whole GRPO runs with the engine and with the padded sampler.

Both draw with the same keys, so tokens are the same while the weights are. The samplers
round differently: a token on the edge between two could part the runs, which then learn
different weights. From there on only the rewards can be compared.
"""

import numpy as np
import optax
import pytest

from tests.rl import clusters
from tests.sft import trainers

STEPS = 14


def train(engine, seed):
  """Returns the weights, the tokens and the mean reward of each rollout."""
  curve = []

  def rewards(prompts, completions, **columns):
    found = clusters.even(prompts, completions, **columns)
    curve.append(float(np.mean(found)))
    return found

  learner = clusters.grpo(
    reward_fns=rewards,
    rollout_engine=engine,
    rollout={"seed": seed},
    actor_optimizer=optax.adam(1e-2),
  )
  cluster, steps = learner.rl_cluster, []
  generate = cluster.rollout.generate

  def recorded(*args, **options):
    before = trainers.leaves(cluster.actor_trainer.model)
    out = generate(*args, **options)
    steps.append((before, [row.tolist() for row in out.tokens]))
    return out

  cluster.rollout.generate = recorded
  learner.train(clusters.prompts(STEPS))
  assert len(steps) == len(curve) == STEPS
  return steps, curve


@pytest.fixture(scope="module")
def padded():
  return [train("padded", seed) for seed in range(3)]


def test_tokens_are_the_same_while_weights_are(padded):
  expected, _ = padded[0]
  steps, _ = train("vanilla", 0)
  for number, ((ours, tokens), (theirs, drawn)) in enumerate(zip(steps, expected)):
    if not all(np.array_equal(ours[name], theirs[name]) for name in ours):
      assert number, "the runs begin with the same weights"
      break
    assert tokens == drawn, number


def test_rewards_rise_alike(padded):
  """Other seeds, so that the draws differ from the first step on."""
  ours = [train("vanilla", seed)[1] for seed in range(3, 5)]
  theirs = [curve for _, curve in padded]
  for curve in (*ours, *theirs):
    assert np.mean(curve[-4:]) > np.mean(curve[:4]) + 0.05, curve
  reached, band = ([np.mean(c[-4:]) for c in x] for x in (ours, theirs))
  assert abs(np.mean(reached) - np.mean(band)) < np.ptp(band), (reached, band)
