"""The order in which a learner samples batches and trains on them.

    sync             sample 0 | train 0 | sample 1 | train 1 | ...
    lagged, lag 1    sample 0 | train 0 and sample 1 | train 1 and sample 2 | ...
    greedy, lag 1    sample 0 and 1 | train 0 and sample 1 and 2 | ...

All three take the batches in the order of the data and train on each batch once. With
lag S, prompts of batches t to t + S may be sampled while the learner waits for batch t.

`Schedule` is the schedule `sync`. `Ahead` is the base class of the other two: `Lagged`
samples whole batches, each with fixed weights, and `Greedy` samples single prompts and
takes new weights between two launches. `admissible` is the rule of the lag.
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
from tunix.rl.schedules.jobs import Job
from tunix.sft.metrics_logger import Mode

_LOOK_S = 1.0  # seconds between two checks that the sampling still makes progress


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
      number: number of batches of rollouts that were trained on before.
    """
    del number
    return source.take()

  def rollouts(self, batch: PromptBatch, mode: Mode, number: int) -> Rollouts:
    """Returns the rollouts of a batch with their rewards.

    Args:
      batch: in training, the result of `next`.
      mode: training or evaluation. Evaluations always use the current weights.
      number: number of batches of rollouts that were trained on before.
    """
    return self._experience.rollouts(batch, mode, number, self._shape_rewards)

  def commit(self) -> None:
    """Marks the batch of the last `next` as trained."""

  def end(self) -> None:
    """Completes a call of `train`, and gives the engine the current weights."""

  def to_json(self) -> list[Any] | None:
    """Returns the batches that are sampled and not yet trained on.

    Returns: None if a batch could not be sampled. The run cannot be saved then.
    """
    return []

  def load(self, saved: list[Any]) -> None:
    """Restores the result of `to_json`."""
    del saved

  def close(self) -> None:
    """Stops the sampling."""


def admissible(lag: int, step: int, size: int) -> int:
  """Returns how many prompts may have started: (S + step) * B.

  This is the rule of AReaL (Fu et al., "AReaL: A Large-Scale Asynchronous Reinforcement
  Learning System for Language Reasoning", 2025). It counts all prompts that run, wait
  for training, or were trained. Batches are trained in order, so no token of the batch
  of a step is older than S steps.

  Args:
    lag: S, the largest age of a token in steps.
    step: number of the step whose batch is collected, from 1.
    size: B, prompts of a step.
  """
  return (lag + step) * size


class Ahead(Schedule):
  """Samples up to `lag` batches ahead of the updates.

  The learner's thread calls all methods. Sampling runs in other threads. They store the
  results of jobs while they hold the condition `_changed`, and then notify it.

  Args:
    cluster: the models.
    experience: samples and computes rewards.
    shape_rewards: see `Experience.rollouts`.
    lag: the lag S, at least 1.
    timeout_s: maximum number of seconds without progress of the sampling. A longer wait
      for a job raises TimeoutError.
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
    self._kept: list[Job] = []  # `_jobs` as of the last `commit`
    self._is_waiting = False  # the learner needs a job
    self._is_stuck = False  # a job has taken longer than `timeout_s`

  # Subclasses define these methods.

  @abc.abstractmethod
  def _job(self, batch: PromptBatch, number: int) -> Job:
    """Returns the job that samples a training batch."""

  @abc.abstractmethod
  def _start(self, new: list[Job]) -> None:
    """Starts to sample the new jobs, which are at the end of `_jobs`."""

  @abc.abstractmethod
  def _last_move(self, job: Job) -> float:
    """Returns the monotonic time of the last progress; raises if `job` cannot end."""

  @abc.abstractmethod
  def _result(self, job: Job) -> Rollouts:
    """Returns the rollouts of a complete job, and records its metrics and times."""

  @abc.abstractmethod
  def _sample_evaluation(self, batch: PromptBatch, number: int) -> Rollouts:
    """Returns rollouts of an evaluation, sampled with the current weights."""

  @abc.abstractmethod
  def _from_json(self, saved: object) -> Job:
    """Restores a job from an element of the result of `to_json`."""

  # Subclasses share these methods.

  def begin(self) -> None:
    self._is_stuck = False
    self._jobs = list(self._kept)

  def has_more(self, source: PromptSource) -> bool:
    return bool(self._jobs) or source.has_more()

  def next(self, source: PromptSource, number: int) -> PromptBatch | None:
    new: list[Job] = []
    # The rule lets lag + number + 1 batches start, and `number` of them are trained.
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
      return self._sample_evaluation(batch, number)
    if not self._jobs or self._jobs[0].batch is not batch:
      raise not_sampled(batch, self.name)
    job = self._jobs[0]
    with self._experience.phases("data_wait"):
      self._complete(job)
    with self._changed:
      self._jobs.pop(0)
    return self._result(job)

  def _complete(self, job: Job) -> None:
    """Waits until a job has all its rollouts; raises the job's error if it failed."""
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
      RuntimeError: the threads that sample ended before the job was complete.
      TimeoutError: the sampling made no progress for `timeout_s`.
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
  """Returns the error for an algorithm that requests rollouts of a wrong batch."""
  return RuntimeError(
    f"the algorithm requests rollouts of batch {batch.number}, which is not the batch "
    f'that was sampled for this step. With schedule "{schedule}" it can request only '
    "the batch that it was given, and only once. Set the schedule to sync"
  )
