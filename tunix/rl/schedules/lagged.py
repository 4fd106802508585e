"""The schedule `lagged`: a thread samples whole batches, each with fixed weights.

With lag S, batch t is sampled with the weights after max(0, t - S) batches. The weights
are copied when they exist, in the learner's thread, and travel with the batch. So the
bytes of a run depend on S and never on the speed of either side.

One queue, with one owner on each side: the learner's thread appends jobs, the thread
that samples removes them in that order. That thread ends when the queue is empty.
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
from tunix.rl.experience import rollout_codec
from tunix.rl.metrics import Mean, Phases
from tunix.rl.pipeline import PromptBatch
from tunix.rl.schedules.jobs import Job, Part
from tunix.rl.schedules.schedule import Ahead
from tunix.sft.metrics_logger import Mode
from tunix.utils import mesh as mesh_lib

_log = logging.getLogger(__name__)

_CLOSE_S = 60.0  # in which a batch may still finish when the learner is closed


class Lagged(Ahead):
  """Samples batches in a thread of its own; see `Ahead`."""

  name = "lagged"

  def __init__(self, *args: Any, **options: Any):
    super().__init__(*args, **options)
    # Guarded by `_changed`. With each job the mesh that is current in the thread.
    self._queue: collections.deque[tuple[Job, Any]] = collections.deque()
    self._thread: threading.Thread | None = None
    self._moved = 0.0  # time at which a job began or ended last

  # The learner's thread.

  def begin(self) -> None:
    super().begin()
    with self._changed:
      queue = [(job, mesh) for job, mesh in self._queue if job in self._kept]
      self._queue = collections.deque(queue)
    for job in self._jobs:
      if job.error is not None:  # its weights are kept, so it may be tried again
        job.error = None
        self._submit(job)

  def _job(self, batch: PromptBatch, number: int) -> Job:
    return Job.whole_of(batch, number)

  def _start(self, new: list[Job]) -> None:
    # The first step submits batches 0 to S, and each later step one more.
    weights = self._cluster.weights() if new else None
    for job in new:
      job.weights = weights
      self._submit(job)

  def _submit(self, job: Job) -> None:
    mesh = self._cluster.rollout.mesh
    mesh = mesh_lib.current_mesh() if mesh is None else mesh
    with self._changed:
      self._queue.append((job, mesh))
      if self._thread is None:
        self._thread = threading.Thread(
          target=self._work, name="tunix-rollouts", daemon=True
        )
        self._thread.start()

  def _last_move(self, job: Job) -> float:
    if self._thread is None or not self._thread.is_alive():
      raise RuntimeError(f"the thread that samples has ended before {job.name}")
    return self._moved

  def _result(self, job: Job) -> Rollouts:
    (part,) = job.parts
    assert part is not None
    self._experience.add(part.measured, part.phases)
    return part.rollouts

  def _sample_evaluation(self, batch: PromptBatch, number: int) -> Rollouts:
    job = Job.whole_of(batch, batch.number, Mode.EVAL)
    self._start([job])
    with self._experience.phases("data_wait"):
      self._complete(job)
    return self._result(job)

  def end(self) -> None:
    for job in self._kept:
      self._wait(job)
    super().end()

  def to_json(self) -> list[Any] | None:
    if self._is_stuck:
      return None
    for job in self._kept:
      self._wait(job)
    if any(job.missing for job in self._kept):
      return None
    return [
      {
        "number": job.number,
        "rollouts": rollout_codec.to_json(part.rollouts),
        "measured": [{k: list(v) for k, v in x.items()} for x in part.measured],
        "seconds": part.phases.seconds,
      }
      for job in self._kept
      for part in job.parts
      if part is not None
    ]

  def _from_json(self, saved: Any) -> Job:
    rollouts = rollout_codec.from_json(saved["rollouts"])
    measured = [{n: Mean(*mean) for n, mean in x.items()} for x in saved["measured"]]
    part = Part(rollouts, measured=measured)
    part.phases.seconds = dict(saved["seconds"])
    job = Job.whole_of(rollouts.batch, saved["number"])
    job.parts = [part]
    return job

  def close(self) -> None:
    with self._changed:
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

  # The thread that samples.

  def _work(self) -> None:
    while True:
      with self._changed:
        if not self._queue:
          self._thread = None
          return
        job, mesh = self._queue.popleft()
        self._moved = time.monotonic()
      part, error = None, None
      try:
        with mesh_lib.use_mesh(mesh):
          part = self._sampled(job)
      except BaseException as e:  # raised in the learner's thread, by `_wait`
        error = e
      with self._changed:
        job.parts, job.error = [part], error
        job.weights = job.weights if error is not None else None
        self._moved = time.monotonic()
        self._changed.notify_all()

  def _sampled(self, job: Job) -> Part:
    assert job.weights is not None
    measured, phases = [], Phases(self._cluster.perf)
    self._cluster.load_weights(job.weights)
    out = self._experience.rollouts(
      job.batch,
      job.mode,
      job.number,
      self._shape_rewards,
      measured=measured,
      phases=phases,
    )
    step = job.weights.version.step
    versions = np.where(out.completion_mask, step, 0).astype(np.int32)
    out = dataclasses.replace(out, versions=versions)
    return Part(out, phases, measured)
