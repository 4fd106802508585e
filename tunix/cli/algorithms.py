"""The algorithm of a run, by the keys `algorithm`: its configuration, its learner."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from tunix.cli.schema import Config
from tunix.rl.algorithm_config import AlgorithmConfig, RolloutCorrection
from tunix.rl.grpo.dapo_learner import DAPOConfig, DAPOLearner, OverlongBuffer
from tunix.rl.grpo.drgrpo_learner import DrGRPOConfig, DrGRPOLearner
from tunix.rl.grpo.grpo_learner import (
  CISPOConfig,
  GRPOConfig,
  GRPOLearner,
  GSPOConfig,
)
from tunix.rl.grpo.rloo_learner import RLOOConfig, RLOOLearner
from tunix.rl.ppo.ppo_learner import PPOConfig, PPOLearner
from tunix.rl.rl_learner import RLLearner

# (learner, configuration)
ALGORITHMS: dict[str, tuple[Any, Any]] = {
  "grpo": (GRPOLearner, GRPOConfig),
  "drgrpo": (DrGRPOLearner, DrGRPOConfig),
  "dapo": (DAPOLearner, DAPOConfig),
  "gspo": (GRPOLearner, GSPOConfig),
  "cispo": (GRPOLearner, CISPOConfig),
  "rloo": (RLOOLearner, RLOOConfig),
  "ppo": (PPOLearner, PPOConfig),
}

# Keys that hold the fields of a configuration of their own.
_NESTED = {"rollout_correction": RolloutCorrection, "overlong_buffer": OverlongBuffer}


def name_of(config: Config) -> str:
  """Which of ALGORITHMS the run is trained by."""
  return "ppo" if config.job == "ppo" else config.algorithm.name or "grpo"


def learner_class(config: Config) -> type[RLLearner]:
  """The learner of the run's algorithm."""
  return ALGORITHMS[name_of(config)][0]


def algorithm_config(config: Config) -> AlgorithmConfig:
  """The algorithm's settings.

  Raises:
    ValueError: a key that the algorithm does not have, or a value out of range.
  """
  name = name_of(config)
  made_of = ALGORITHMS[name][1]
  known = [field.name for field in dataclasses.fields(made_of)]
  given = config.algorithm.given()
  for key in given:
    if key not in known:
      raise ValueError(
        f"algorithm.{key} is set, and {name} has no such thing: leave it out"
      )
  for key in _NESTED.keys() & given.keys():
    given[key] = _nested(key, given[key])
  try:
    made = made_of(**given)
  except (TypeError, ValueError) as error:
    raise ValueError(f"algorithm: {error}") from error
  if config.rl.reference is not None and not made.beta:
    raise ValueError(
      f"rl.reference is {config.rl.reference!r} and algorithm.beta 0: nothing would be "
      "compared with it; set algorithm.beta, or leave it out"
    )
  return made


def _nested(key: str, values: dict[str, Any]) -> Any:
  known = [field.name for field in dataclasses.fields(_NESTED[key])]
  for name in values:
    if name not in known:
      near = difflib.get_close_matches(name, known, n=1)
      remedy = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
      raise ValueError(f"algorithm.{key}.{name} is unknown: {remedy}")
  try:
    return _NESTED[key](**values)
  except (TypeError, ValueError) as error:
    raise ValueError(f"algorithm.{key}: {error}") from error
