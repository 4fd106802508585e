"""RLOO: REINFORCE with the mean of the other completions as the baseline (Ahmadian et
al. 2024, arXiv:2402.14740)."""

from __future__ import annotations

import dataclasses

from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLOOConfig(GRPOConfig):
  """Leave-one-out advantages; the ratio is that of whole completions."""

  advantage_estimator: str = "leave_one_out"
  loss_algo: str = "rloo"
  loss_agg_mode: str = "sequence-mean-token-mean"  # a token carries its row's ratio


class RLOOLearner(GRPOLearner):
  """GRPOLearner by the settings of RLOOConfig."""

  algo_config: RLOOConfig
