"""Programs of an RL learner, lowered from shapes without data or weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunix.perf import programs
from tunix.perf.programs import ProgramRecord
from tunix.rl import learner_state
from tunix.rl.rl_learner import RLLearner
from tunix.rl.trainer import Trainer

# Programs of the models that rl.offload_to_cpu keeps in host memory between runs.
OTHERS = ("reference scoring", "reward scoring", "critic scoring", "critic update")


def of_learner(
  learner: RLLearner, batch: Mapping[str, Any]
) -> dict[str, ProgramRecord]:
  """Returns {name: program} of a step, in the order of their first calls.

  The programs are those of rollouts (of the engine, or unstack, prefill and decode),
  of scoring, of the updates, and of the stamp that tells the engine which weights it
  holds.

  Args:
    learner: a learner whose models are shapes. Its reward functions are called with
      completions that were not sampled.
    batch: a batch of prompts, as the learner's data source gives it.
  """
  with programs.recording() as records:
    learner.lower_step(batch)
  return records


def trainers(learner: RLLearner) -> dict[str, Trainer]:
  """Returns {name of the update program: trainer}."""
  of_roles = learner_state.trainers(learner.rl_cluster)
  return {f"{role} update": trainer for role, trainer in of_roles.items()}
