"""Batches of prompts of the schedule `greedy`, and the rule that lets them start."""

from __future__ import annotations

import dataclasses

from tunix.rl.common import Rollouts
from tunix.rl.engine_loop import GroupPolicy
from tunix.rl.pipeline import PromptBatch


def admissible(lag: int, step: int, size: int) -> int:
  """Returns how many prompts may have started: (S + step) * B.

  The rule of AReaL (Fu et al., "AReaL: A Large-Scale Asynchronous Reinforcement
  Learning System for Language Reasoning", 2025), where prompts that are trained, wait
  or run all count. As batches are trained in order, no token of the batch of a step is
  older than S steps.

  Args:
    lag: S, the largest age of a token in steps.
    step: number of the step whose batch is collected, from 1.
    size: B, prompts of a step.
  """
  return (lag + step) * size


@dataclasses.dataclass(eq=False)
class Job:
  """A batch of prompts.

  Attributes:
    batch: the prompts.
    number: batches that are trained on before it.
    groups: rollouts of each prompt, None as long as they are not complete.
    ended_at: times at which they were.
    seconds: by phase, of each prompt.
    policies: those of the prompts that were started and not ended.
  """

  batch: PromptBatch
  number: int
  groups: list[Rollouts | None]
  ended_at: list[float]
  seconds: list[dict[str, float]] = dataclasses.field(default_factory=list)
  policies: dict[int, GroupPolicy] = dataclasses.field(default_factory=dict)

  @classmethod
  def of(cls, batch: PromptBatch, number: int) -> Job:
    count = len(batch.prompts)
    return cls(batch, number, [None] * count, [0.0] * count)

  @property
  def missing(self) -> list[int]:
    """Prompts whose rollouts are not complete."""
    return [i for i, group in enumerate(self.groups) if group is None]
