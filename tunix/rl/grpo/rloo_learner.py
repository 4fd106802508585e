"""RLOO: REINFORCE with the mean of the other completions as the baseline (Ahmadian et
al. 2024, arXiv:2402.14740)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from tunix.rl.common import TrainExample
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.pipeline import PromptBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLOOConfig(GRPOConfig):
  """GRPOConfig with leave-one-out advantages and the ratio of whole completions.

  The KL penalty, summed over a completion, is a part of its reward.
  """

  kl_in_loss: ClassVar[bool] = False

  beta: float = 0.05
  kl_method: str | Callable[..., Any] = "k1"
  advantage_estimator: str = "leave_one_out"
  loss_algo: str = "rloo"
  # Every token has the ratio of its whole row, so the mean over the tokens of a row is
  # this ratio.
  loss_agg_mode: str = "sequence-mean-token-mean"


class RLOOLearner(GRPOLearner):
  """GRPOLearner with the settings of RLOOConfig."""

  algo_config: RLOOConfig

  def _generate_and_compute_advantage(self, batch: PromptBatch) -> TrainExample:
    rollouts, config = self._rollouts(batch), self.algo_config
    old, divergence = self._experience.kl_penalty(rollouts)
    if divergence is not None:
      sums = divergence.sum(1, dtype=np.float64).reshape(*rollouts.scores.shape, -1)
      # An episode may have several rows.
      scores = rollouts.scores - config.beta * sums.sum(2)
      rollouts = dataclasses.replace(rollouts, scores=scores)
    return self._with_advantages(rollouts, old)
