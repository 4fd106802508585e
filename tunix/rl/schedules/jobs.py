"""Batches that are sampled ahead, with the rollouts that have ended."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

from tunix.rl import common
from tunix.rl.common import Rollouts
from tunix.rl.experience import rollout_codec
from tunix.rl.metrics import Mean, Phases
from tunix.rl.pipeline import PromptBatch
from tunix.rl.schedules.decisions import GroupClient, GroupEnd
from tunix.rl.schedules.journal import Journal, JournalError
from tunix.rl.weights.placement import Weights
from tunix.sft.metrics_logger import Mode
from tunix.utils import coordination


@dataclasses.dataclass(eq=False)
class Part:
  """Sampled rollouts with their rewards.

  The episodes lose their environments here, because neither a checkpoint nor a journal
  can store an environment.

  Attributes:
    rollouts: the rollouts.
    phases: seconds that each phase of their sampling took.
    measured: their metrics.
    ended_at: monotonic time at which they ended; 0 if the time is not known.
  """

  rollouts: Rollouts
  phases: Phases = dataclasses.field(default_factory=Phases)
  measured: list[dict[str, Mean]] = dataclasses.field(default_factory=list)
  ended_at: float = 0.0

  def __post_init__(self):
    for episode in self.rollouts.episodes:
      episode.environment = None


@dataclasses.dataclass(eq=False)
class Job:
  """A batch of prompts that is sampled ahead of its update.

  Attributes:
    batch: the prompts.
    number: number of batches that are trained on before it.
    mine: indices of the parts that this process samples.
    parts: rollouts of each prompt, or of the whole batch; None until they are complete.
    mode: see `Schedule.rollouts`.
    weights: the weights to sample with, if the schedule fixes them; None once the job
      no longer needs them.
    error: the error that ended the sampling of a part; None if there is none.
    clients: clients of the groups that have started and not ended, by prompt.
  """

  batch: PromptBatch
  number: int
  mine: range
  parts: list[Part | None]
  mode: Mode = Mode.TRAIN
  weights: Weights | None = None
  error: BaseException | None = None
  clients: dict[int, GroupClient] = dataclasses.field(default_factory=dict)

  @classmethod
  def of_prompts(cls, batch: PromptBatch, number: int) -> Job:
    """Returns a job with a part for each prompt; each process has some of them."""
    count = len(batch.prompts)
    return cls(batch, number, coordination.share(count), [None] * count)

  @classmethod
  def whole_of(cls, batch: PromptBatch, number: int, mode: Mode = Mode.TRAIN) -> Job:
    """Returns a job with one part, on every process."""
    return cls(batch, number, range(1), [None], mode)

  @property
  def name(self) -> str:
    """Name of the batch in messages."""
    kind = "evaluation" if self.mode is Mode.EVAL else "rollouts"
    return f"batch {self.number} of the {kind}"

  @property
  def missing(self) -> list[int]:
    """Indices of the parts of this process that are not complete."""
    return [i for i in self.mine if self.parts[i] is None]

  @property
  def first_missing(self) -> str:
    """Name of the first missing part in messages."""
    is_whole = len(self.parts) < len(self.batch.prompts)
    return self.name if is_whole else f"prompt {self.missing[0]} of {self.name}"

  @property
  def whole(self) -> Rollouts:
    """The rollouts of all parts, which are complete."""
    return common.joined([part.rollouts for part in self.parts if part is not None])

  def take(self, end: GroupEnd) -> None:
    """Stores the part of a group that has ended."""
    _, prompt = end.client.group
    part = Part(end.rollouts, end.client.phases, ended_at=time.monotonic())
    self.parts[prompt] = part
    self.clients.pop(prompt, None)

  def read_ends(self, journal: Journal | None) -> None:
    """Reads the groups that ended in an earlier process.

    Raises:
      RecordError: the journal is damaged.
      JournalError: it has other prompts.
    """
    if journal is None:
      return
    for prompt in self.missing:
      if (self.number, prompt) not in journal.ends:
        continue
      rollouts = rollout_codec.from_json(journal.content((self.number, prompt)))
      if str(rollouts.batch.prompts) != str([self.batch.prompts[prompt]]):
        raise JournalError(
          f"{journal.folder} has other data for prompt {prompt} of batch "
          f"{self.number}: use the data of that run, or another folder"
        )
      self.parts[prompt] = Part(rollouts)

  def share(self) -> list[Any]:
    """Returns the groups of this process, which are complete, as JSON."""
    return [
      rollout_codec.to_json(part.rollouts)
      for part in self.parts[self.mine.start : self.mine.stop]
      if part is not None
    ]

  def take_shares(self, shares: Sequence[Sequence[Any]]) -> None:
    """Stores the groups of the other processes; `shares` has one per process."""
    groups = [group for share in shares for group in share]
    for prompt, group in enumerate(groups):
      if prompt not in self.mine:
        self.parts[prompt] = Part(rollout_codec.from_json(group))

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
