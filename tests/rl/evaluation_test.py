"""Metrics over several batches, of rollouts made by hand."""

import numpy as np
import pytest

from tunix.rl import evaluation
from tunix.rl.common import Rollouts, Tokens
from tunix.rl.pipeline import PromptBatch
from tunix.rl.rewards import RewardOutput

NAN = float("nan")


def rollouts(total, lengths):
  """Groups of one, by a reward function that is called min_words."""
  total, rows = np.asarray(total, float), len(total)
  ids = np.ones((rows, max(lengths)), np.int32)
  mask = np.arange(max(lengths)) < np.asarray(lengths)[:, None]
  return Rollouts(
    batch=PromptBatch(prompts=["p"] * rows, columns={}, number=0),
    text=["c"] * rows,
    finish_reasons=["eos"] * rows,
    tokens=Tokens(
      prompt_ids=ids,
      prompt_mask=mask,
      completion_ids=ids,
      completion_mask=mask,
      rollout_logps=np.zeros(ids.shape, np.float32),
      truncated=np.zeros(rows, bool),
    ),
    rewards=RewardOutput(
      total=total, by_function={"min_words": total}, outcomes={"min_words": []}
    ),
    scores=total[:, None],
  )


def test_every_reward_counts_the_same_whatever_batch_it_is_of():
  # One reward of 1 and three of 0: a mean of the batches' means would be 1/2.
  batches = [rollouts([1, NAN, NAN, NAN], [2, 2, 2, 2]), rollouts([0, 0, 0], [1, 5, 3])]
  out = evaluation.summary(batches, threshold=0.5)
  assert out == {
    "rewards/score/mean": 0.25,
    "rewards/score/max": 1,
    "rewards/score/min": 0,
    "rewards/min_words": 0.25,
    "rewards/failed": 3 / 7,
    "completions/mean_length": 17 / 7,
    "completions/max_length": 5,
    "completions/min_length": 1,
    "completions/truncated": 0,
    "pass@1": 0.25,
  }


def test_batches_of_other_columns_are_named():
  first, other = (PromptBatch(prompts=["p"], columns={c: [1]}, number=0) for c in "ab")
  with pytest.raises(ValueError, match=r"\['a'\] and \['b'\] are put together"):
    first.joined([other])
