"""The advantages of REINFORCE++, by hand."""

import types

import numpy as np
import pytest

from tests.rl import clusters
from tunix.rl import common
from tunix.rl.grpo.reinforce_pp_learner import (
  ReinforcePlusPlusConfig,
  ReinforcePlusPlusLearner,
)
from tunix.rl.pipeline import PromptBatch
from tunix.rl.reward.rewards import RewardOutput


def advantages(scores, mask, divergence, beta=0.5):
  """Runs the method of the learner on rollouts that are made by hand."""
  mask = np.array(mask, bool)
  rollouts = common.Rollouts(
    batch=PromptBatch(prompts=["a"] * len(mask), columns={}, number=0),
    text=["b"] * len(mask),
    finish_reasons=["eos"] * len(mask),
    prompt_ids=np.zeros((len(mask), 1), np.int32),
    prompt_mask=np.ones((len(mask), 1), bool),
    completion_ids=np.zeros(mask.shape, np.int32),
    completion_mask=mask,
    rollout_logps=np.zeros(mask.shape, np.float32),
    rewards=RewardOutput(),
    scores=np.array(scores, float)[:, None],
  )
  old = None if divergence is None else "old"
  learner = types.SimpleNamespace(
    _rollouts=lambda batch: rollouts,
    _example=lambda rollouts, advantages, old: (advantages, old),
    _experience=types.SimpleNamespace(
      kl_penalty=lambda rollouts: (old, divergence),
      counted=lambda rollouts: rollouts.valid.reshape(-1),
    ),
    algo_config=ReinforcePlusPlusConfig(beta=beta),
  )
  generate = ReinforcePlusPlusLearner._generate_and_compute_advantage
  return generate(learner, None)


def test_a_token_has_the_rewards_that_follow_it_normalized_over_the_batch():
  # Divergences of 2 at the first token and 4 at the second cost 1 and 2.
  divergence = np.array([[2.0, 4.0], [2.0, 0.0]], np.float32)
  got, old = advantages([3.0, 1.0], [[1, 1], [1, 0]], divergence)
  # Rewards to come: 3 - 1 - 2, 3 - 2; 1 - 1. Mean 1/3; squares 1/9 + 4/9 + 1/9 over 2.
  want = (np.array([[0, 1], [0, 1 / 3]]) - 1 / 3) / (1 / 3) ** 0.5
  np.testing.assert_allclose(got, want, atol=1e-5)
  assert old == "old" and got[1, 1] == 0


def test_without_a_divergence_every_token_has_the_score_of_its_completion():
  got, old = advantages([1.0, 0.0, np.nan], [[1, 0], [1, 1], [1, 1]], None)
  want = np.array([[2 / 3, 0], [-1 / 3, -1 / 3], [0, 0]]) / (1 / 3) ** 0.5
  np.testing.assert_allclose(got, want, atol=1e-5)  # a row without a reward is not used
  assert old is None


def test_another_estimator_is_refused():
  with pytest.raises(ValueError, match='use GRPO with "centered_normalized"'):
    ReinforcePlusPlusConfig(advantage_estimator="group_normalized")


def test_a_run_with_one_completion_of_each_prompt():
  cluster = clusters.cluster(reference=clusters.model(seed=1))
  config = ReinforcePlusPlusConfig(beta=0.1)
  learner = ReinforcePlusPlusLearner(cluster, config, clusters.even)
  seen, example = [], learner._example
  learner._example = lambda *args: seen.append(example(*args)) or seen[-1]
  learner.train(clusters.prompts(1))
  (batch,) = seen
  drawn = batch.advantages[batch.completion_mask]
  assert learner.train_steps == 1 and len(batch.advantages) == 4
  np.testing.assert_allclose([drawn.mean(), drawn.std(ddof=1)], [0, 1], atol=1e-4)
  # The penalty differs by token.
  assert np.ptp(batch.advantages[0][batch.completion_mask[0]]) > 0
