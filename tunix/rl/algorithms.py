"""The named algorithms: the name on the command, the config class and the learner.

A new algorithm is a module with its config (and its learner, if no learner here fits)
and one line in `ALGORITHMS`.
"""

from __future__ import annotations

from typing import NamedTuple

from tunix.rl.algorithm_config import AlgorithmConfig
from tunix.rl.grpo.dapo_learner import DAPOConfig, DAPOLearner
from tunix.rl.grpo.drgrpo_learner import DrGRPOConfig, DrGRPOLearner
from tunix.rl.grpo.grpo_learner import (
  CISPOConfig,
  GRPOConfig,
  GRPOLearner,
  GSPOConfig,
  MaxRLConfig,
  SAPOConfig,
)
from tunix.rl.grpo.reinforce_pp_learner import (
  ReinforcePlusPlusConfig,
  ReinforcePlusPlusLearner,
)
from tunix.rl.grpo.rloo_learner import RLOOConfig, RLOOLearner
from tunix.rl.grpo.sdpo_learner import SDPOConfig, SDPOLearner
from tunix.rl.ppo.ppo_learner import PPOConfig, PPOLearner
from tunix.rl.rl_learner import RLLearner


class Algorithm(NamedTuple):
  """A config class and the learner class that runs it."""

  config: type[AlgorithmConfig]
  learner: type[RLLearner]


ALGORITHMS = {
  "grpo": Algorithm(GRPOConfig, GRPOLearner),
  "drgrpo": Algorithm(DrGRPOConfig, DrGRPOLearner),
  "dapo": Algorithm(DAPOConfig, DAPOLearner),
  "gspo": Algorithm(GSPOConfig, GRPOLearner),
  "cispo": Algorithm(CISPOConfig, GRPOLearner),
  "sapo": Algorithm(SAPOConfig, GRPOLearner),
  "maxrl": Algorithm(MaxRLConfig, GRPOLearner),
  "rloo": Algorithm(RLOOConfig, RLOOLearner),
  "sdpo": Algorithm(SDPOConfig, SDPOLearner),
  "reinforce++": Algorithm(ReinforcePlusPlusConfig, ReinforcePlusPlusLearner),
  "ppo": Algorithm(PPOConfig, PPOLearner),
}


def configs(*, uses_critic: bool) -> dict[str, type[AlgorithmConfig]]:
  """Returns the config classes by name of the algorithms with, or without, a critic."""
  return {
    name: algorithm.config
    for name, algorithm in ALGORITHMS.items()
    if algorithm.learner.uses_critic == uses_critic
  }


def learner_of(config: AlgorithmConfig) -> type[RLLearner]:
  """Returns the learner class that runs a config of one of the `ALGORITHMS`."""
  return {algo.config: algo.learner for algo in ALGORITHMS.values()}[type(config)]
