"""Whole GRPO runs with both samplers of `rollout_engine`: "vanilla" and "padded".

The engine and the padded sampler draw with the same keys, so they differ in rounding
only. The update reads tokens and rewards, not the sampler's log-probabilities. As long
as the tokens are equal, the weights are equal to the bit.
"""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from tests import optimizers
from tests.rl import clusters

STEPS, RATE = 24, 3e-3
SEEDS = (0, 1, 2)


@dataclasses.dataclass
class Run:
  """The rewards [STEPS], the texts of each step, and the last weights of a run."""

  rewards: list[float] = dataclasses.field(default_factory=list)
  texts: list[list[str]] = dataclasses.field(default_factory=list)
  weights: list[np.ndarray] = dataclasses.field(default_factory=list)


def run(engine, seed, steps=STEPS):
  out = Run()

  def reward(prompts, completions, **columns):
    found = clusters.even(prompts, completions, **columns)
    out.texts.append(list(completions))
    out.rewards.append(float(np.mean(found)))
    return found

  learner = clusters.grpo(
    reward_fns=reward,
    rollout_engine=engine,
    rollout={"seed": seed},
    actor_optimizer=optimizers.adam(RATE),
    max_steps=steps,
  )
  wanted = {"vanilla": "engine"}.get(engine, engine)
  assert learner.rl_cluster.rollout.sampler == wanted
  learner.train(clusters.prompts(steps, size=8, seed=7))
  params = nnx.state(learner.rl_cluster.actor, nnx.Param)
  out.weights = [np.asarray(x) for x in jax.tree.leaves(params)]
  return out


def equal_steps(one, other):
  """Returns the number of steps before the first one with another token."""
  pairs = zip(one.texts, other.texts, strict=True)
  return next((i for i, (a, b) in enumerate(pairs) if a != b), len(one.texts))


def test_equal_weights_draw_equal_tokens_and_end_as_equal_weights():
  engine, padded = (run(name, seed=0, steps=3) for name in ("vanilla", "padded"))
  assert equal_steps(engine, padded) == 3
  for a, b in zip(engine.weights, padded.weights, strict=True):
    np.testing.assert_array_equal(a, b)
  other = run("padded", seed=1, steps=1)  # else equal texts would prove nothing
  assert other.texts[0] != padded.texts[0]


@pytest.mark.slow
def test_learning_is_within_the_band_of_the_seeds():
  padded = [run("padded", seed) for seed in SEEDS]
  engine = [run("vanilla", seed) for seed in SEEDS]
  ends = {
    name: [float(np.mean(r.rewards[-6:])) for r in runs]
    for name, runs in (("engine", engine), ("padded", padded))
  }
  for a, b in zip(engine, padded):
    same = equal_steps(a, b)
    assert same > 0
    # Rewards read tokens only.
    np.testing.assert_array_equal(a.rewards[:same], b.rewards[:same])
  start = float(np.mean([r.rewards[0] for r in padded]))
  assert min(ends["padded"]) > start + 0.05, (start, ends)  # it learns
  width = max(ends["padded"]) - min(ends["padded"])
  for end in ends["engine"]:
    low, high = min(ends["padded"]) - width, max(ends["padded"]) + width
    assert low <= end <= high, (start, ends)
  print(f"{start=:.3f}, {ends}, {[equal_steps(a, b) for a, b in zip(engine, padded)]}")
