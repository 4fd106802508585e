"""Batches of prompts of the schedule `greedy`, and the rule that lets them start."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

from tunix.rl import common
from tunix.rl.common import Rollouts
from tunix.rl.experience import saved_rollouts
from tunix.rl.pipeline import PromptBatch
from tunix.rl.schedules.engine_loop import Ended, GroupPolicy
from tunix.rl.schedules.journal import Journal, JournalError
from tunix.utils import coordination


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
    mine: prompts that this process samples.
    groups: rollouts of each prompt, None as long as they are not complete.
    ended_at: times at which they were.
    seconds: by phase, of each prompt.
    policies: those of the prompts that were started and not ended.
  """

  batch: PromptBatch
  number: int
  mine: range
  groups: list[Rollouts | None]
  ended_at: list[float]
  seconds: list[dict[str, float]] = dataclasses.field(default_factory=list)
  policies: dict[int, GroupPolicy] = dataclasses.field(default_factory=dict)

  @classmethod
  def of(cls, batch: PromptBatch, number: int) -> Job:
    count = len(batch.prompts)
    mine = coordination.share(count)
    return cls(batch, number, mine, [None] * count, [0.0] * count)

  @property
  def missing(self) -> list[int]:
    """Prompts of this process whose rollouts are not complete."""
    return [i for i in self.mine if self.groups[i] is None]

  @property
  def whole(self) -> Rollouts:
    """The rollouts of all prompts, which are complete."""
    return common.joined([group for group in self.groups if group is not None])

  def take(self, ended: Ended) -> None:
    """Stores a group that has ended."""
    _, prompt = ended.policy.group
    self.groups[prompt] = ended.rollouts
    self.ended_at[prompt] = time.monotonic()
    self.seconds.append(ended.policy.phases.seconds)
    self.policies.pop(prompt, None)

  def read_ended(self, journal: Journal | None) -> None:
    """Reads the groups that ended in an earlier process.

    Raises:
      RecordError: the journal is damaged.
      JournalError: it has other prompts.
    """
    if journal is None:
      return
    for prompt in self.missing:
      if (self.number, prompt) not in journal.ended:
        continue
      rollouts = saved_rollouts.from_json(journal.content((self.number, prompt)))
      if str(rollouts.batch.prompts) != str([self.batch.prompts[prompt]]):
        raise JournalError(
          f"{journal.folder} has other data for prompt {prompt} of batch "
          f"{self.number}: use the data of that run, or another folder"
        )
      self.groups[prompt] = rollouts

  def share(self) -> list[Any]:
    """Returns the groups of this process, which are complete, as JSON."""
    return [
      saved_rollouts.to_json(group)
      for group in self.groups[self.mine.start : self.mine.stop]
      if group is not None
    ]

  def take_shares(self, shares: Sequence[Sequence[Any]]) -> None:
    """Stores the groups of the other processes: one `share` of each of all."""
    groups = [group for share in shares for group in share]
    for prompt, group in enumerate(groups):
      if prompt not in self.mine:
        self.groups[prompt] = saved_rollouts.from_json(group)

  def to_json(self) -> dict[str, Any]:
    """Returns the prompts; their rollouts are in the journal.

    Raises:
      TypeError: a column of the data is not JSON.
    """
    out = {"number": self.number, "batch": dataclasses.asdict(self.batch)}
    try:
      json.dumps(out)
    except TypeError as error:
      raise TypeError(
        f"prompts cannot be saved as JSON ({error}): use strings, numbers, lists and "
        "dicts in the columns of the data"
      ) from error
    return out
