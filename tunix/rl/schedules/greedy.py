"""The schedule `greedy`: an engine that is always full, next to the learner.

    engine    | prompts of batches t to t + S, new weights between two launches ...
    learner   | train t | train t + 1 | train t + 2 | ...

Each prompt is a group: a thread of its own runs its environments and rewards, and asks
the engine for actions (engine_loop.py). Batches start and are trained in the order of
the data, so nothing is discarded and no length is favored. The rule of admission
bounds the age of every token, see `jobs.admissible`.

What depends on timing is which requests and which weights the engine takes before which
launch, and is in the journal (journal.py). After a kill, groups that had ended are read
from it, and the others start again. A replay takes the same decisions before the same
launches, so that the engine computes the same bytes.

Each of several processes has an engine and a journal, and samples its share of every
batch. The processes exchange a batch when it is complete. They start their engines and
copy weights in the same steps, because all of them compute the copies.
"""

from __future__ import annotations

import contextlib
import json
import logging
import pathlib
import threading
import time
from typing import Any

import jax

from tunix.rl.common import Rollouts
from tunix.rl.experience import saved_rollouts
from tunix.rl.experience.experience import Experience, ShapeRewards, check_same_prompts
from tunix.rl.pipeline import PromptBatch, PromptSource
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.rollout.vanilla_rollout import VanillaRollout
from tunix.rl.schedules import journal as journal_lib
from tunix.rl.schedules.deciders import Live, Replayed
from tunix.rl.schedules.engine_loop import (
  Abandoned,
  Decider,
  Ended,
  EngineLoop,
  GroupPolicy,
)
from tunix.rl.schedules.jobs import Job, admissible
from tunix.rl.schedules.journal import FOLDER, Journal, JournalError
from tunix.rl.schedules.schedule import Sync, not_sampled
from tunix.rl.weights import local_arrays
from tunix.sft.metrics_logger import Mode
from tunix.utils import coordination, mesh as mesh_lib

_log = logging.getLogger(__name__)

_LOOK_S = 1.0  # between two looks of the learner at the engine's thread
_LAUNCH_S = 3600.0  # for a launch in a replay, which may compile
_CLOSE_S = 60.0  # in which threads may still end when the learner is closed


class Greedy(Sync):
  """Keeps an engine full, `lag` batches ahead of the updates.

  Args:
    cluster: the models.
    experience: samples and computes rewards.
    shape_rewards: see `Experience.rollouts`.
    lag: S, at least 1.
    timeout_s: seconds in which nothing may happen.
    max_tokens: most tokens of a prompt and all that follows it.
    generations: completions of a prompt.
    folder: folder of the checkpoints, which has the journal; None: there is no journal.
    replay: folder of a journal to repeat; None: decisions are taken here.

  Raises:
    ValueError: the rollout engine cannot be used.
    RecordError: the journal is damaged.
    JournalError: it belongs to another run.
    FileNotFoundError: there is no journal to repeat.
  """

  def __init__(
    self,
    cluster: RLCluster,
    experience: Experience,
    shape_rewards: ShapeRewards,
    *,
    lag: int,
    timeout_s: float,
    max_tokens: int,
    generations: int,
    folder: str | None,
    replay: str | None,
  ):
    super().__init__(experience, shape_rewards)
    if not isinstance(rollout := cluster.rollout, VanillaRollout):
      raise ValueError(
        f"rollout_engine is {type(rollout).__name__}, and schedule is 'greedy', which "
        'needs our engine: set rollout_engine to "vanilla"'
      )
    rollout.check_separate_engine()
    self._rollout: VanillaRollout = rollout
    self._cluster, self._lag, self._timeout_s = cluster, lag, timeout_s
    self._max_tokens, self._generations = max_tokens, generations
    self._journal: Journal | None = None
    self._replayed: Journal | None = None
    if replay is not None:
      self._replayed = Journal(journal_lib.folder_of(pathlib.Path(replay)), reads=True)
      self._decider: Decider = Replayed(self._replayed, timeout_s)
      # It names what does not come. The learner's limit is for a launch without end.
      self._timeout_s += _LAUNCH_S
    else:
      if folder is not None:
        base = pathlib.Path(folder) / FOLDER
        self._journal = Journal(journal_lib.folder_of(base))
      self._decider = Live(self._journal)
    seed = cluster.cluster_config.rollout(Mode.TRAIN).seed
    if (journal := self._journal or self._replayed) is not None:
      settings = {"lag": lag, "generations": generations, "seed": seed}
      if self._has_others:
        settings["processes"] = jax.process_count()
      journal.check(settings)
    if self._journal is not None:
      self._journal.decisions.clear()  # only a replay needs them
    self._jobs: list[Job] = []  # not yet trained on, in the order of training
    self._kept: list[Job] = []  # the same after the last `commit`
    self._loop: EngineLoop | None = None
    self._threads: list[threading.Thread] = []

  # The learner's thread.

  def begin(self) -> None:
    self._stop()
    self._check_first_weights()
    self._jobs = list(self._kept)
    for job in self._jobs:  # an end may have been written while the threads ended
      job.read_ended(self._journal)

  def _check_first_weights(self) -> None:
    """Refuses the journal of another model; a checkpoint has a stamp of its own."""
    known = None if self._journal is None else self._journal.first_stamp
    stamp = self._cluster.version.stamp
    if known not in (None, stamp) and not self._cluster.actor_trainer.train_steps:
      raise JournalError(
        f"{self._journal and self._journal.folder} belongs to a run that began with "
        f"other weights (stamp {known}, and these have {stamp}): use the model of that "
        "run, or another folder"
      )

  def has_more(self, source: PromptSource) -> bool:
    return bool(self._jobs) or source.has_more()

  def next(self, source: PromptSource, number: int) -> PromptBatch | None:
    # In batches, the rule allows lag + number + 1 of them, of which `number` are gone.
    most = admissible(self._lag, number + 1, 1) - number
    while len(self._jobs) < most and (batch := source.take()) is not None:
      check_same_prompts(batch, Mode.TRAIN)
      job = Job.of(batch, number + len(self._jobs))
      job.read_ended(self._journal)
      with self._guard():
        self._jobs.append(job)
    if not self._jobs:
      return None
    # A run that is resumed first makes the updates whose batches are complete. The
    # engine then begins with weights that are at least as new as its last ones.
    if self._loop is None and self._is_engine_needed():
      self._start(self._prompts_of_first_batch())
    if self._loop is not None:
      with self._loop.changed:
        self._start_groups()
    return self._jobs[0].batch

  def _is_engine_needed(self) -> bool:
    """Returns True if the first batch is not complete, on any process."""
    missing = bool(self._jobs[0].missing)
    return any(coordination.gather("prompts that are missing", missing))

  def rollouts(self, batch: PromptBatch, mode: Mode, number: int) -> Rollouts:
    if mode is Mode.EVAL:
      return self._evaluated(batch, number)
    if not self._jobs or self._jobs[0].batch is not batch:
      raise not_sampled(batch, "greedy")
    experience, job = self._experience, self._jobs[0]
    with experience.phases("data_wait"):
      self._exchange(job) if self._has_others else self._wait(job)
    with self._guard():
      self._jobs.pop(0)
    self._note_timings(job)
    return experience.shaped(job.whole, self._shape_rewards, experience.measured)

  @property
  def _has_others(self) -> bool:
    return jax.process_count() > 1

  def _exchange(self, job: Job) -> None:
    """Waits for the prompts of this process, and takes those of the others.

    Raises:
      AbsentError: another process failed, or did not take part in time.
      TypeError: a column of the data or a message of an environment is not JSON.
    """
    rollout: Any = self._rollout  # one in each process, as `setup` has checked

    def mine() -> list[Any]:
      self._wait(job)
      return job.share()

    job.take_shares(rollout.exchange("rollouts", mine))
    self._experience.phases.add("exchange_wait", rollout.take_waited())

  def _note_timings(self, job: Job) -> None:
    phases, now = self._experience.phases, time.monotonic()
    ages = [now - at for at in job.ended_at if at]
    phases.add("queue_age", sum(ages) / max(1, len(ages)))
    missing = sum(len(job.missing) for job in self._jobs)
    phases.note("episodes_in_flight", float(missing * self._generations))
    phases.add("engine_idle", 0.0 if self._loop is None else self._loop.take_idle())
    # Prompts are sampled at the same time, and rewards are computed one by one.
    each = lambda name: [seconds.get(name, 0.0) for seconds in job.seconds]
    phases.add("rollout", max(each("rollout"), default=0.0))
    phases.add("rewards", sum(each("rewards")))

  def _evaluated(self, batch: PromptBatch, number: int) -> Rollouts:
    """Samples with the rollout's own engine, while the greedy one makes a pause."""
    self._cluster.load_weights(self._cluster.weights())
    if self._loop is None:
      return super().rollouts(batch, Mode.EVAL, number)
    with self._experience.phases("data_wait"):
      self._loop.park(self._timeout_s)
    try:
      return super().rollouts(batch, Mode.EVAL, number)
    finally:
      self._loop.go_on()

  def commit(self) -> None:
    self._kept = list(self._jobs)
    if self._loop is not None:
      self._loop.offer(self._cluster.weights())

  def end(self) -> None:
    self._stop()
    self._cluster.load_weights(self._cluster.weights())

  def to_json(self) -> list[Any] | None:
    """Returns the prompts that are ahead; their rollouts are in the journal."""
    if self._journal is not None:
      self._journal.sync()
    return [job.to_json() for job in self._kept]

  def load(self, saved: list[Any]) -> None:
    for one in saved:
      job = Job.of(PromptBatch(**one["batch"]), one["number"])
      job.read_ended(self._journal)
      self._jobs.append(job)
    self.commit()

  def close(self) -> None:
    self._stop()
    for journal in (self._journal, self._replayed):
      if journal is not None:
        journal.close()
    self._journal = self._replayed = None

  def _guard(self) -> contextlib.AbstractContextManager[Any]:
    """Returns the lock of what the engine's thread reads, if there is that thread."""
    return contextlib.nullcontext() if self._loop is None else self._loop.changed

  def _prompts_of_first_batch(self) -> int:
    """Returns the size that all engines of a run have, also those after a kill.

    A replay has one size for all of them, and the size changes the last bits of
    log-probabilities. The last batch of the data may be smaller.
    """
    ended = {} if self._journal is None else self._journal.ended
    size = sum(batch == 0 for batch, _ in ended)
    job = self._jobs[0]
    own = max(1, len(job.mine))
    return (size or own) if job.number else own

  def _start(self, prompts: int) -> None:
    """Starts the engine's thread with the present weights."""
    rows = prompts * self._generations * (self._lag + 1)
    model: Any = self._rollout.model()
    self._loop = EngineLoop(
      lambda: self._rollout.separate_engine(rows, self._max_tokens),
      self._cluster.cluster_config.rollout(Mode.TRAIN),
      self._decider,
      on_end=self._take,
      on_start=self._start_again,
      vocab_size=model.config.vocab_size,
      mesh=self._rollout.mesh,
    )
    self._loop.offer(self._cluster.weights())
    self._loop.start()

  def _stop(self) -> None:
    """Ends the threads. What is not complete is sampled again."""
    if self._loop is None:
      return
    until = time.monotonic() + min(_CLOSE_S, self._timeout_s)
    left = lambda: max(0.0, until - time.monotonic())
    with self._loop.changed:
      self._abandon()
    has_ended = self._loop.stop(left())
    for thread in self._threads:
      thread.join(left())
    alive = sum(thread.is_alive() for thread in self._threads)
    if alive or not has_ended:
      _log.warning(
        "%d threads of environments or reward functions and %d of the engine have not "
        "ended; they end with the process",
        *(alive, int(not has_ended)),
      )
    self._loop, self._threads = None, []

  def _wait(self, job: Job) -> None:
    """Waits until a batch is complete.

    Raises:
      RuntimeError: the engine's thread has ended.
      TimeoutError: nothing has happened for `timeout_s`.
    """
    if self._loop is None:
      assert not job.missing
      return
    with self._loop.changed:
      self._loop.is_needed = True
      try:
        self._wait_for_groups(self._loop, job)
      finally:
        self._loop.is_needed = False

  def _wait_for_groups(self, loop: EngineLoop, job: Job) -> None:
    began = time.monotonic()
    while missing := job.missing:
      if loop.failure is not None:
        raise loop.failure
      still = time.monotonic() - max(began, loop.moved)
      if still > self._timeout_s:
        raise TimeoutError(
          f"prompt {missing[0]} of batch {job.number} of the rollouts is not "
          f"finished, and nothing was drawn for {self._timeout_s:g} s "
          "(rollout_timeout_s): an environment or a reward function hangs. Give "
          "reward functions workers and a timeout_s, or raise rollout_timeout_s"
        )
      loop.changed.wait(min(_LOOK_S, self._timeout_s))

  # With `changed` held, in the learner's thread or in that of the engine.

  def _start_groups(self) -> None:
    for job in self._jobs:
      key = local_arrays.key_here(self._experience.key(job.batch, job.number))
      for prompt in job.missing:
        if prompt not in job.policies:
          self._start_group(job, prompt, key)

  def _start_group(self, job: Job, prompt: int, key: Any) -> None:
    assert self._loop is not None
    first = prompt * self._generations
    policy = GroupPolicy(self._loop, (job.number, prompt), key, first)
    job.policies[prompt] = policy
    thread = threading.Thread(
      target=self._run_group,
      args=(job.batch.take([prompt]), policy, self._loop, mesh_lib.current_mesh()),
      name="tunix-greedy-group",
      daemon=True,
    )
    self._threads = [t for t in self._threads if t.is_alive()]
    self._threads.append(thread)
    thread.start()

  def _take(self, ended: Ended) -> None:
    for job in self._jobs:
      if job.number == ended.policy.group[0]:
        job.take(ended)

  def _abandon(self) -> None:
    for job in {id(job): job for job in [*self._jobs, *self._kept]}.values():
      for policy in job.policies.values():
        policy.is_abandoned = True
      job.policies.clear()

  def _start_again(self) -> None:
    """Starts all that has not ended, as a process does that was started again."""
    self._abandon()
    self._start_groups()

  # The thread of a group.

  def _run_group(
    self, batch: PromptBatch, policy: GroupPolicy, loop: EngineLoop, mesh: Any
  ) -> None:
    try:
      with mesh_lib.use_mesh(mesh):
        rollouts = self._experience.group(batch, policy, policy.phases)
      # Environments are not part of the journal, so none is kept in memory either.
      for episode in rollouts.episodes:
        episode.environment = None
      content, offset = None, 0
      if self._journal is not None or self._replayed is not None:
        content = json.loads(json.dumps(saved_rollouts.to_json(rollouts)))
      if policy.is_abandoned:
        return
      if self._journal is not None:
        offset = self._journal.store(content)
      policy.hand_in(rollouts, content, offset)
    except Abandoned:
      pass
    except BaseException as error:  # raised in the learner's thread, by `rollouts`
      if not policy.is_abandoned:
        loop.fail(error)
