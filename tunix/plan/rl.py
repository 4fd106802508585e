"""The programs of a learner, from shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunix.perf import programs
from tunix.perf.programs import Noted
from tunix.rl import learner_state
from tunix.rl.rl_learner import RLLearner
from tunix.rl.trainer import Trainer

# Programs of models that rl.offload_to_cpu keeps in host memory.
OTHERS = ("reference scoring", "reward scoring", "critic scoring", "critic update")


def of_learner(learner: RLLearner, batch: Mapping[str, Any]) -> dict[str, Noted]:
  """{name: program} of a learner whose models are shapes, in the order of a step:
  rollouts (unstack, prefill, decode), scoring of the roles that score, updates, and the
  stamp by which the engine knows its weights.

  Args:
    learner: whose reward functions may be asked about completions that nobody sampled.
    batch: a batch of prompts as its data gives one.
  """
  with programs.noted() as noted:
    learner.lower_step(batch)
  return noted


def trainers(learner: RLLearner) -> dict[str, Trainer]:
  """What is trained, by the name of its update."""
  of_roles = learner_state.trainers(learner.rl_cluster)
  return {f"{role} update": trainer for role, trainer in of_roles.items()}
