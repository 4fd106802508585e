"""How metrics of several batches come together."""

import dataclasses

import numpy as np
import pytest

from tunix.rl import common, metrics
from tunix.rl.pipeline import PromptBatch
from tunix.rl.reward.rewards import RewardOutput


def test_extremes_are_told_by_their_names_and_not_by_how_these_begin():
  parts = [
    {"rewards/score/max": 1.0, "completions/min_length": 2.0, "rewards/min_words": 1.0},
    {"rewards/score/max": 3.0, "completions/min_length": 1.0, "rewards/min_words": 4.0},
  ]
  weighted = [
    {name: metrics.Mean(value, weight) for name, value in part.items()}
    for part, weight in zip(parts, (1, 2))
  ]
  assert metrics.mean_of(weighted) == {
    "rewards/score/max": 3.0,
    "completions/min_length": 1.0,
    "rewards/min_words": 3.0,
  }


def rollouts(*rewards):
  """One prompt, completions of one token each, with these rewards."""
  rewards, shape = np.array(rewards), (len(rewards), 1)
  return common.Rollouts(
    batch=PromptBatch(prompts=["p"], columns={}, number=0),
    text=["x"] * len(rewards),
    finish_reasons=["stop"] * len(rewards),
    prompt_ids=np.ones(shape, np.int32),
    prompt_mask=np.ones(shape, bool),
    completion_ids=np.ones(shape, np.int32),
    completion_mask=np.ones(shape, bool),
    rollout_logps=np.zeros(shape, np.float32),
    group_size=len(rewards),
    rewards=RewardOutput().plus("f", rewards),
    scores=rewards[None],
  )


def test_a_mean_over_batches_is_that_of_all_rewards_that_were_given():
  parts = [rollouts(1.0, np.nan, np.nan, np.nan), rollouts(0.0, 0.0, 0.0, 0.0)]
  means = metrics.mean_of([metrics.of_rollouts(part) for part in parts])
  assert means["rewards/score/mean"] == means["rewards/f"] == 0.2  # 1 of 5
  assert means["rewards/failed"] == 3 / 8


def test_quartiles_are_those_of_the_prompts_and_not_of_the_completions():
  one = rollouts(0.0, 1.0)
  # Means of the four prompts: 0.5, 0 (one reward failed), 1, and none.
  nan = np.nan
  totals = np.array([[0.0, 1.0], [0.0, nan], [1.0, 1.0], [nan, nan]])
  several = dataclasses.replace(
    one,
    batch=PromptBatch(prompts=list("abcd"), columns={}, number=0),
    finish_reasons=["stop"] * 8,
    completion_mask=np.ones((8, 1), bool),
    scores=totals,
    rewards=RewardOutput().plus("f", totals.ravel()),
  )
  found = metrics.of_rollouts(several)
  assert found["rewards/score/prompt_p25"] == (0.25, 3)
  assert found["rewards/score/prompt_p75"] == (0.75, 3)
  # One prompt has no spread, and one completion says nothing of its prompt.
  assert not any("prompt_p" in name for name in metrics.of_rollouts(one))


def test_batches_of_other_columns_are_named():
  first, other = (PromptBatch(prompts=["p"], columns={c: [1]}, number=0) for c in "ab")
  with pytest.raises(ValueError, match="columns"):
    first.joined([other])
