"""REINFORCE++: PPO's clip and a KL penalty in the rewards, without a critic (Hu et al.
2025, arXiv:2501.03262)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from tunix.ops import advantages
from tunix.rl import common
from tunix.rl.algorithm_config import AlgorithmConfig
from tunix.rl.common import TrainExample
from tunix.rl.pipeline import PromptBatch
from tunix.rl.rl_learner import RLLearner


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlusConfig(AlgorithmConfig):
  """AlgorithmConfig for the rewards that follow each token, normalized over the batch.

  Groups may have one completion. The KL penalty of each token is a part of its reward.
  """

  kl_in_loss: ClassVar[bool] = False

  beta: float = 0.01
  kl_method: str | Callable[..., Any] = "k1"
  advantage_estimator: str = "returns"

  def _check_advantages(self) -> None:
    if self.advantage_estimator != "returns":
      raise ValueError(
        f"advantage_estimator is {self.advantage_estimator!r}: REINFORCE++ uses "
        '"returns"; for its form with a baseline use GRPO with "centered_normalized"'
      )


class ReinforcePlusPlusLearner(RLLearner):
  """Computes the advantage of each token from the rewards at and after it."""

  algo_config: ReinforcePlusPlusConfig

  def _generate_and_compute_advantage(self, batch: PromptBatch) -> TrainExample:
    rollouts = self._rollouts(batch)
    old, divergence = self._experience.kl_penalty(rollouts)
    mask = jnp.asarray(rollouts.completion_mask)
    rewards = common.token_rewards(rollouts, divergence, self.algo_config.beta)
    # Without a critic and with gamma = lam = 1, this is the sum of the rewards.
    returns, _ = advantages.gae(
      jnp.asarray(rewards), jnp.zeros(mask.shape), mask, gamma=1.0, lam=1.0
    )
    valid = mask & self._experience.counted(rollouts)[:, None]
    return self._example(rollouts, np.asarray(advantages.whiten(returns, valid)), old)
