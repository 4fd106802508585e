"""GRPO: the other completions of a prompt are the baseline (Shao et al. 2024,
arXiv:2402.03300).

GSPO, CISPO and SAPO use the ratio in other ways, and MaxRL has other advantages; the
same learner runs them with another config.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tunix.ops import advantages
from tunix.rl.algorithm_config import AlgorithmConfig, resolve
from tunix.rl.common import Rollouts, TrainExample
from tunix.rl.pipeline import PromptBatch
from tunix.rl.rl_learner import RLLearner
from tunix.utils import checks
from tunix.utils.setting import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRPOConfig(AlgorithmConfig):
  """AlgorithmConfig with at least two completions for each prompt.

  Attributes:
    decoupled_rewards: if True, `advantage_estimator` compares the rewards of each
      function separately, before they are added with their weights (GDPO,
      arXiv:2601.05242, see `ops.advantages.decoupled`). In a plain sum, a reward with a
      large spread dominates the others. A penalty that the algorithm adds to the total
      (an overlong penalty) is treated like the reward of one more function.

  Raises:
    ValueError: `num_generations` is below 2: a group of one has no baseline.
  """

  num_generations: int = setting(2, in_command=8)
  decoupled_rewards: bool = False

  def __post_init__(self):
    super().__post_init__()
    if self.num_generations < 2:
      raise ValueError(
        f"num_generations is {self.num_generations}: a group needs at least 2 "
        "completions to compare"
      )

  @property
  def wastes_equal_groups(self) -> bool:
    # Totals can be equal while the rewards of each function differ.
    return super().wastes_equal_groups and not self.decoupled_rewards


@dataclasses.dataclass(frozen=True, kw_only=True)
class GSPOConfig(GRPOConfig):
  """GSPO (Zheng et al. 2025, arXiv:2507.18071): the ratio of a whole completion,
  normalized by its length, with the clips of the paper."""

  beta: float = 0.0
  loss_algo: str = "gspo"
  loss_agg_mode: str = "sequence-mean-token-mean"
  epsilon_low: float | None = 3e-4
  epsilon_high: float | None = 4e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class CISPOConfig(GRPOConfig):
  """CISPO (MiniMax-M1, arXiv:2506.13585): weights on the log-probabilities, which are
  clipped only from above."""

  beta: float = 0.0
  loss_algo: str = "cispo"
  epsilon_low: float | None = 1.0  # a lower clip of 1 is ratio 0: it clips nothing
  epsilon_high: float | None = 4.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SAPOConfig(GRPOConfig):
  """SAPO (Gao et al. 2025, arXiv:2511.20347): a smooth gate in the place of the clip.

  Attributes:
    positive_temperature: how fast the gradient of a token with a positive advantage
      shrinks as its ratio moves away from 1.
    negative_temperature: the same for other advantages.
  """

  beta: float = 0.0
  loss_algo: str = "sapo"
  loss_agg_mode: str = "sequence-mean-token-mean"
  positive_temperature: float = 1.0
  negative_temperature: float = 1.05

  def __post_init__(self):
    super().__post_init__()
    checks.fields(
      self,
      positive_temperature=checks.POSITIVE,
      negative_temperature=checks.POSITIVE,
    )

  @property
  def gate_temperatures(self) -> dict[str, float]:
    return {
      "positive": self.positive_temperature,
      "negative": self.negative_temperature,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaxRLConfig(GRPOConfig):
  """MaxRL (Tajwar et al. 2026, arXiv:2602.02710): advantages divided by the mean reward
  of the group, so that hard prompts count more; rewards must not be negative."""

  beta: float = 0.0
  advantage_estimator: str = "mean_normalized"


class GRPOLearner(RLLearner):
  """Computes advantages from the rewards of each group; see RLLearner for arguments."""

  algo_config: GRPOConfig

  def _generate_and_compute_advantage(self, batch: PromptBatch) -> TrainExample:
    return self._with_advantages(self._rollouts(batch))

  def _with_advantages(
    self, rollouts: Rollouts, old: np.ndarray | None = None
  ) -> TrainExample:
    return self._example(rollouts, self._group_advantages(rollouts), old)

  def _group_advantages(self, rollouts: Rollouts) -> np.ndarray:
    """Returns the advantage of each completion in its group, [P * G]."""
    estimate = resolve(
      "advantage_estimator",
      self.algo_config.advantage_estimator,
      advantages.ADVANTAGES,
    )
    if self.algo_config.decoupled_rewards:
      parts, weights = rollouts.reward_parts()
      decoupled: Any = advantages.decoupled  # of NumPy arrays: rewards are float64
      values = decoupled(estimate, parts, weights, where=rollouts.valid)
    else:
      values = estimate(np.nan_to_num(rollouts.scores), where=rollouts.valid)
    return np.asarray(values).reshape(-1)
