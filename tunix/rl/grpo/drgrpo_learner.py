"""Dr.GRPO: GRPO without its length bias and its bias by the spread of a group's rewards
(Liu et al. 2025, arXiv:2503.20783)."""

from __future__ import annotations

import dataclasses

from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrGRPOConfig(GRPOConfig):
  """GRPOConfig with centered rewards; losses are divided by the token limit."""

  beta: float = 0.0
  advantage_estimator: str = "group_centered"
  loss_agg_mode: str = "sequence-mean-token-scale"


class DrGRPOLearner(GRPOLearner):
  """GRPOLearner with the settings of DrGRPOConfig."""

  algo_config: DrGRPOConfig
