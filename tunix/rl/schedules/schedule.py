"""The order of sampling and training: `Schedule`, and `Ahead` of the updates.

    sync       sample 0 | train 0 | sample 1 | train 1 | ...
    lagged 1   sample 0 | train 0, and sample 1 meanwhile | train 1, and sample 2 | ...
    greedy 1   sample 0 and 1 | train 0, and sample 1 and 2 meanwhile | ...

All three take the batches of the data in their order and train on each of them once.
With lag S, prompts of batches t to t + S may be sampled while batch t is waited for.
How they are sampled is in lagged.py (whole batches, fixed weights) and in greedy.py
(single prompts, new weights meanwhile).
"""

from __future__ import annotations

import abc
import threading
import time
from typing import Any, ClassVar

from tunix.rl.common import Rollouts
from tunix.rl.experience.experience import Experience, ShapeRewards
from tunix.rl.pipeline import PromptBatch, PromptSource
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.schedules.jobs import Job, admissible
from tunix.sft.metrics_logger import Mode

_LOOK_S = 1.0  # between two looks at what samples


class Schedule:
  """Samples a batch when its update needs it: the schedule `sync`, with lag 0.

  Args:
    experience: samples and computes rewards.
    shape_rewards: see `Experience.rollouts`.
  """

  def __init__(self, experience: Experience, shape_rewards: ShapeRewards):
    self._experience, self._shape_rewards = experience, shape_rewards

  def begin(self) -> None:
    """Prepares a call of `train`: forgets batches of an interrupted step."""

  def has_more(self, source: PromptSource) -> bool:
    """Returns True if `next` has another batch."""
    return source.has_more()

  def next(self, source: PromptSource, number: int) -> PromptBatch | None:
    """Returns the prompts of the next update; None at the end of the data.

    Args:
      source: draws the prompts.
      number: batches of rollouts that were trained on before.
    """
    del number
    return source.take()

  def rollouts(self, batch: PromptBatch, mode: Mode, number: int) -> Rollouts:
    """Returns the rollouts of a batch with their rewards.

    Args:
      batch: in training, the result of `next`.
      mode: in evaluations, the current weights sample.
      number: batches of rollouts that were trained on before.
    """
    return self._experience.rollouts(batch, mode, number, self._shape_rewards)

  def commit(self) -> None:
    """Marks the batch of the last `next` as trained."""

  def end(self) -> None:
    """Completes a call of `train`: the engine then has the current weights."""

  def to_json(self) -> list[Any] | None:
    """Returns the batches that are sampled and not yet trained on.

    Returns: None if they could not be sampled; the run cannot be saved then.
    """
    return []

  def load(self, saved: list[Any]) -> None:
    """Restores the result of `to_json`."""
    del saved

  def close(self) -> None:
    """Ends the sampling."""


class Ahead(Schedule):
  """Samples up to `lag` batches ahead of the updates.

  The learner's thread calls all methods. What samples runs in other threads; it writes
  the results of jobs while it holds `_changed`, and notifies.

  Args:
    cluster: the models.
    experience: samples and computes rewards.
    shape_rewards: see `Experience.rollouts`.
    lag: the lag S, at least 1.
    timeout_s: seconds in which nothing may happen.
  """

  name: ClassVar[str]

  def __init__(
    self,
    cluster: RLCluster,
    experience: Experience,
    shape_rewards: ShapeRewards,
    *,
    lag: int,
    timeout_s: float,
  ):
    super().__init__(experience, shape_rewards)
    self._cluster, self._lag, self._timeout_s = cluster, lag, timeout_s
    self._changed = threading.Condition()
    self._jobs: list[Job] = []  # not yet trained on, in the order of training
    self._kept: list[Job] = []  # the same after the last `commit`
    self._is_waiting = False  # the learner needs a job
    self._is_stuck = False  # a job has taken longer than `timeout_s`

  # Written by subclasses.

  @abc.abstractmethod
  def _job(self, batch: PromptBatch, number: int) -> Job:
    """Returns the job of a batch of training."""

  @abc.abstractmethod
  def _start(self, new: list[Job]) -> None:
    """Starts the sampling of new jobs, which are the last of `_jobs`."""

  @abc.abstractmethod
  def _last_move(self, job: Job) -> float:
    """Returns the time at which something moved last; raises if a job cannot end."""

  @abc.abstractmethod
  def _result(self, job: Job) -> Rollouts:
    """Returns the rollouts of a job that has ended, and counts its times."""

  @abc.abstractmethod
  def _evaluated(self, batch: PromptBatch, number: int) -> Rollouts:
    """Returns rollouts of an evaluation, sampled by the current weights."""

  @abc.abstractmethod
  def _from_json(self, saved: object) -> Job:
    """Restores a job of `to_json`."""

  # The same for all.

  def begin(self) -> None:
    self._is_stuck = False
    self._jobs = list(self._kept)

  def has_more(self, source: PromptSource) -> bool:
    return bool(self._jobs) or source.has_more()

  def next(self, source: PromptSource, number: int) -> PromptBatch | None:
    new: list[Job] = []
    # In batches, the rule allows lag + number + 1 of them, of which `number` are gone.
    most = admissible(self._lag, number + 1, 1) - number
    while len(self._jobs) < most and (batch := source.take()) is not None:
      job = self._job(batch, number + len(self._jobs))
      with self._changed:
        self._jobs.append(job)
      new.append(job)
    if not self._jobs:
      return None
    self._start(new)
    return self._jobs[0].batch

  def rollouts(self, batch: PromptBatch, mode: Mode, number: int) -> Rollouts:
    if mode is Mode.EVAL:
      return self._evaluated(batch, number)
    if not self._jobs or self._jobs[0].batch is not batch:
      raise not_sampled(batch, self.name)
    job = self._jobs[0]
    with self._experience.phases("data_wait"):
      self._complete(job)
    with self._changed:
      self._jobs.pop(0)
    return self._result(job)

  def _complete(self, job: Job) -> None:
    """Waits until a job has all its rollouts; raises the error that it ended with."""
    self._wait(job)
    if job.error is not None:
      raise job.error

  def commit(self) -> None:
    self._kept = list(self._jobs)

  def end(self) -> None:
    self._cluster.load_weights(self._cluster.weights())

  def load(self, saved: list[Any]) -> None:
    self._jobs += [self._from_json(one) for one in saved]
    self.commit()

  def _wait(self, job: Job) -> None:
    """Waits until this process has its parts of a job, or the job has an error.

    Raises:
      RuntimeError: what samples has ended without it.
      TimeoutError: nothing has moved for `timeout_s`.
    """
    began = time.monotonic()
    with self._changed:
      self._is_waiting = True
      try:
        while job.missing and job.error is None:
          if time.monotonic() - max(began, self._last_move(job)) > self._timeout_s:
            self._is_stuck = True
            raise self._timeout(job)
          self._changed.wait(min(_LOOK_S, self._timeout_s))
      finally:
        self._is_waiting = False

  def _timeout(self, job: Job) -> TimeoutError:
    return TimeoutError(
      f"{job.first_missing} is not finished, and nothing was drawn or rewarded for "
      f"{self._timeout_s:g} s (rollout_timeout_s): an environment or a reward function "
      "hangs, or takes longer. Give reward functions workers and a timeout_s, or raise "
      "rollout_timeout_s"
    )


def not_sampled(batch: PromptBatch, schedule: str) -> RuntimeError:
  """Returns the error of an algorithm that asks for another batch than its own."""
  return RuntimeError(
    f"rollouts of batch {batch.number} were asked for, which is not the batch that was "
    f'sampled for this step: with schedule "{schedule}" an algorithm asks once for the '
    "rollouts of the batch that it was given. Set the schedule to sync"
  )
