"""GRPO: groups of completions are their own baseline (Shao et al. 2024, 2402.03300).

GSPO and CISPO are other ratios in the same loss: configurations of the same learner.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from tunix.ops import advantages
from tunix.rl.algorithm_config import AlgorithmConfig, resolve
from tunix.rl.common import Rollouts, TrainExample
from tunix.rl.pipeline import PromptBatch
from tunix.rl.rl_learner import RLLearner


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRPOConfig(AlgorithmConfig):
  """AlgorithmConfig with at least two completions a prompt.

  Attributes:
    decoupled_rewards: compare the rewards of each function by themselves, by
      `advantage_estimator`, before they are added up with their weights (GDPO,
      arXiv:2601.05242, see `ops.advantages.decoupled`): in a sum one that spreads far
      drowns the others. What shapes the total (an overlong penalty) is one more.

  Raises:
    ValueError: `num_generations` below 2: a group of one has no baseline.
  """

  num_generations: int = 2
  decoupled_rewards: bool = False

  def __post_init__(self):
    super().__post_init__()
    if self.num_generations < 2:
      raise ValueError(
        f"num_generations is {self.num_generations}: a group needs at least 2 "
        "completions to compare"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GSPOConfig(GRPOConfig):
  """GSPO (Zheng et al. 2025, arXiv:2507.18071): ratios of completions, normalised by
  length, with the paper's clips."""

  beta: float = 0.0
  loss_algo: str = "gspo"
  loss_agg_mode: str = "sequence-mean-token-mean"
  epsilon_low: float | None = 3e-4
  epsilon_high: float | None = 4e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class CISPOConfig(GRPOConfig):
  """CISPO (MiniMax-M1, arXiv:2506.13585): clipped weights on the log-probs, only from
  above."""

  beta: float = 0.0
  loss_algo: str = "cispo"
  epsilon_low: float | None = 1.0
  epsilon_high: float | None = 4.0


class GRPOLearner(RLLearner):
  """Advantages from each group's own rewards; see RLLearner for the arguments."""

  algo_config: GRPOConfig

  def _generate_and_compute_advantage(self, batch: PromptBatch) -> TrainExample:
    return self._with_advantages(self._rollouts(batch))

  def _with_advantages(
    self, rollouts: Rollouts, old: np.ndarray | None = None
  ) -> TrainExample:
    estimate = resolve(
      "advantage_estimator",
      self.algo_config.advantage_estimator,
      advantages.ADVANTAGES,
    )
    if self.algo_config.decoupled_rewards:
      parts, weights = rollouts.reward_parts()
      where = jnp.asarray(rollouts.valid)
      arrays = [jnp.asarray(part) for part in parts]
      values = advantages.decoupled(estimate, arrays, weights, where=where)
    else:
      values = estimate(np.nan_to_num(rollouts.scores), where=rollouts.valid)
    return self._example(rollouts, np.asarray(values).reshape(-1), old)
