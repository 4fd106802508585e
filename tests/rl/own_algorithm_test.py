"""An algorithm of one's own: the two methods that a learner may override."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.rl import clusters
from tunix.generate import scoring
from tunix.ops.reductions import aggregate
from tunix.rl.rl_learner import RLLearner


class BestOfGroup(RLLearner):
  """Raises the log-probability of the best completion of a group."""

  def _generate_and_compute_advantage(self, batch):
    rollouts = self._rollouts(batch)
    best = rollouts.scores == rollouts.scores.max(axis=1, keepdims=True)
    self.share = np.average(best.reshape(-1), weights=rollouts.lengths)
    return self._example(rollouts, best.reshape(-1))

  def _compute_policy_loss(self, model, example):
    logps = scoring.score_completions(
      model,
      example.prompt_ids,
      example.prompt_mask,
      example.completion_ids,
      example.completion_mask,
      group_size=example.group_size,
    ).logps
    mask = example.completion_mask.astype(jnp.float32)
    chosen = jnp.broadcast_to(example.advantages[:, None], mask.shape)
    return aggregate(-logps, mask * chosen), {"chosen": aggregate(chosen, mask)}


def test_both_methods_decide_what_is_learnt():
  learner: Any = clusters.grpo(learner=BestOfGroup, train_micro_batch_size=2)
  learner.train(clusters.prompts(1) * 2)
  first, second = learner.history["actor/train/loss"].values
  assert 0 < second != first > 0  # negative log-probabilities
  assert 0 < learner.share < 1
  assert learner.history["actor/train/chosen"].values[-1] == pytest.approx(
    learner.share, abs=1e-6
  )
  learner.close()
