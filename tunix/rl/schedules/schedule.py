"""The order of sampling and training: `sync`, or `lagged` with a thread that samples.

The third one is in greedy.py.

    sync       sample 0 | train 0 | sample 1 | train 1 | ...
    lagged 1   sample 0 | train 0, and sample 1 meanwhile | train 1, and sample 2 | ...

With lag S, batch t is sampled with the weights after max(0, t - S) batches. The weights
are copied when they exist, in the learner's thread, and travel with the batch. So the
bytes of a run depend on S and never on the speed of either side.

One queue, with one owner on each side: the learner's thread appends jobs, the thread
that samples removes them in that order. That thread ends when the queue is empty. The
learner's waits look at the thread every second and have a limit.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from typing import Any

import numpy as np

from tunix.rl.common import Rollouts
from tunix.rl.experience import saved_rollouts
from tunix.rl.experience.experience import Experience, ShapeRewards
from tunix.rl.metrics import Mean, Phases
from tunix.rl.pipeline import PromptBatch, PromptSource
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.weights.placement import Weights
from tunix.sft.metrics_logger import Mode
from tunix.utils import mesh as mesh_lib

_log = logging.getLogger(__name__)

_LOOK_S = 1.0  # between two looks at the thread that samples
_CLOSE_S = 60.0  # in which a batch may still finish when the learner is closed


class Sync:
  """Samples a batch when its update needs it.

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


def not_sampled(batch: PromptBatch, schedule: str) -> RuntimeError:
  """Returns the error of an algorithm that asks for another batch than its own."""
  return RuntimeError(
    f"rollouts of batch {batch.number} were asked for, which is not the batch that was "
    f'sampled for this step: with schedule "{schedule}" an algorithm asks once for the '
    "rollouts of the batch that it was given. Set the schedule to sync"
  )


@dataclasses.dataclass(eq=False)
class _Job:
  """A batch to sample.

  Attributes:
    batch, mode, number: see `Sync.rollouts`.
    weights: a copy of the weights to sample with; None when they are not needed again.
    mesh: the mesh of the engine of this process, or else of the learner's thread.
    rollouts, measured, phases: the results.
    error: the reason why there are none.
  """

  batch: PromptBatch
  mode: Mode
  number: int
  weights: Weights | None = None
  mesh: Any = None
  rollouts: Rollouts | None = None
  measured: list[dict[str, Mean]] = dataclasses.field(default_factory=list)
  phases: Phases = dataclasses.field(default_factory=Phases)
  error: BaseException | None = None

  @property
  def name(self) -> str:
    kind = "evaluation" if self.mode is Mode.EVAL else "rollouts"
    return f"batch {self.number} of the {kind}"

  @property
  def is_finished(self) -> bool:
    return self.rollouts is not None or self.error is not None


class Lagged(Sync):
  """Samples in a thread of its own, `lag` batches ahead of the updates.

  Args:
    cluster: the models.
    experience: samples and computes rewards; only the thread calls its `rollouts`.
    shape_rewards: see `Experience.rollouts`.
    lag: the lag S, at least 1.
    timeout_s: seconds that one batch may take.
  """

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
    self._jobs: list[_Job] = []  # not yet trained on, in the order of training
    self._kept: list[_Job] = []  # the same after the last `commit`
    self._is_stuck = False  # a batch has taken longer than `timeout_s`
    self._news = threading.Condition()  # guards everything below
    self._queue: collections.deque[_Job] = collections.deque()
    self._thread: threading.Thread | None = None
    self._moved = 0.0  # time at which a job began or ended last

  # The learner's thread.

  def begin(self) -> None:
    self._is_stuck = False
    with self._news:
      dropped = [job for job in self._queue if job not in self._kept]
      for job in dropped:
        self._queue.remove(job)
    self._jobs = list(self._kept)
    for job in self._jobs:
      if job.error is not None:  # its weights are kept, so it may be tried again
        job.error = None
        self._submit(job)

  def has_more(self, source: PromptSource) -> bool:
    return bool(self._jobs) or source.has_more()

  def next(self, source: PromptSource, number: int) -> PromptBatch | None:
    weights = None
    # The first step submits batches 0 to S, and each later step one more.
    while len(self._jobs) <= self._lag and (batch := source.take()) is not None:
      weights = self._cluster.weights() if weights is None else weights
      job = _Job(batch, Mode.TRAIN, number + len(self._jobs), weights)
      self._jobs.append(job)
      self._submit(job)
    return self._jobs[0].batch if self._jobs else None

  def rollouts(self, batch: PromptBatch, mode: Mode, number: int) -> Rollouts:
    if mode is Mode.EVAL:
      job = _Job(batch, mode, batch.number, self._cluster.weights())
      self._submit(job)
    elif not self._jobs or self._jobs[0].batch is not batch:
      raise not_sampled(batch, "lagged")
    else:
      job = self._jobs.pop(0)
    with self._experience.phases("data_wait"):
      self._wait(job)
    if job.error is not None:
      raise job.error
    assert job.rollouts is not None
    self._experience.add(job.measured, job.phases)
    return job.rollouts

  def commit(self) -> None:
    self._kept = list(self._jobs)

  def end(self) -> None:
    for job in self._kept:
      self._wait(job)
    self._cluster.load_weights(self._cluster.weights())

  def to_json(self) -> list[Any] | None:
    if self._is_stuck:
      return None
    for job in self._kept:
      self._wait(job)
    if any(job.error is not None for job in self._kept):
      return None
    return [
      {
        "number": job.number,
        "rollouts": saved_rollouts.to_json(job.rollouts),
        "measured": [{k: list(v) for k, v in part.items()} for part in job.measured],
        "seconds": job.phases.seconds,
      }
      for job in self._kept
      if job.rollouts is not None
    ]

  def load(self, saved: list[Any]) -> None:
    for one in saved:
      rollouts = saved_rollouts.from_json(one["rollouts"])
      job = _Job(rollouts.batch, Mode.TRAIN, one["number"], rollouts=rollouts)
      job.measured = [
        {name: Mean(*mean) for name, mean in part.items()} for part in one["measured"]
      ]
      job.phases.seconds = dict(one["seconds"])
      self._jobs.append(job)
    self.commit()

  def close(self) -> None:
    with self._news:
      self._queue.clear()
      thread = self._thread
    if thread is None:
      return
    thread.join(min(_CLOSE_S, self._timeout_s))
    if thread.is_alive():
      _log.warning(
        "a batch of rollouts is still being sampled after %g s; its thread ends with "
        "the process",
        min(_CLOSE_S, self._timeout_s),
      )

  def _submit(self, job: _Job) -> None:
    mesh = self._cluster.rollout.mesh
    job.mesh = mesh_lib.current_mesh() if mesh is None else mesh
    with self._news:
      self._queue.append(job)
      if self._thread is None:
        self._thread = threading.Thread(
          target=self._work, name="tunix-rollouts", daemon=True
        )
        self._thread.start()

  def _wait(self, job: _Job) -> None:
    """Waits until a job is finished.

    Raises:
      RuntimeError: the thread has ended without it.
      TimeoutError: nothing has moved for `timeout_s`.
    """
    began = time.monotonic()
    with self._news:
      while not job.is_finished:
        if self._thread is None or not self._thread.is_alive():
          raise RuntimeError(f"the thread that samples has ended before {job.name}")
        still = time.monotonic() - max(began, self._moved)
        if still > self._timeout_s:
          self._is_stuck = True
          raise TimeoutError(
            f"{job.name} is not finished, and no batch has been for "
            f"{self._timeout_s:g} s (rollout_timeout_s): an environment or a reward "
            "function hangs, or a batch takes longer. Give reward functions workers "
            "and a timeout_s, or raise rollout_timeout_s"
          )
        self._news.wait(min(_LOOK_S, self._timeout_s))

  # The thread that samples.

  def _work(self) -> None:
    while True:
      with self._news:
        if not self._queue:
          self._thread = None
          return
        job = self._queue.popleft()
        self._moved = time.monotonic()
      error = None
      try:
        rollouts = self._sampled(job)
      except BaseException as e:  # raised in the learner's thread, by `rollouts`
        rollouts, error = None, e
      with self._news:
        job.rollouts, job.error = rollouts, error
        job.weights = job.weights if error is not None else None
        self._moved = time.monotonic()
        self._news.notify_all()

  def _sampled(self, job: _Job) -> Rollouts:
    assert job.weights is not None
    job.measured, job.phases = [], Phases(self._cluster.perf)
    with mesh_lib.use_mesh(job.mesh):
      self._cluster.load_weights(job.weights)
      out = self._experience.rollouts(
        job.batch,
        job.mode,
        job.number,
        self._shape_rewards,
        measured=job.measured,
        phases=job.phases,
      )
    step = job.weights.version.step
    # Environments are not part of a checkpoint, so that none is kept in memory either.
    for episode in out.episodes:
      episode.environment = None
    versions = np.where(out.completion_mask, step, 0).astype(np.int32)
    return dataclasses.replace(out, versions=versions)
