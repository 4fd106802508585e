"""RLOO: REINFORCE with the mean of the other completions as the baseline (Ahmadian et
al. 2024, arXiv:2402.14740)."""

from __future__ import annotations

import dataclasses

from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLOOConfig(GRPOConfig):
  """Leave-one-out advantages of whole completions, as a sum over their tokens."""

  advantage_estimator: str = "leave_one_out"
  loss_agg_mode: str = "sequence-mean-token-sum"
  loss_algo: str = "reinforce"

  def __post_init__(self):
    super().__post_init__()
    if self.loss_algo == "reinforce" and self.num_iterations > 1:
      raise ValueError(
        f"num_iterations is {self.num_iterations}: without a ratio the later updates "
        'would be off-policy; set loss_algo="grpo" as well'
      )


class RLOOLearner(GRPOLearner):
  """GRPOLearner by the settings of RLOOConfig."""

  algo_config: RLOOConfig
