"""The schedule `greedy`: an engine stays full while the learner trains.

    engine    | prompts of batches t to t + S, new weights between two launches ...
    learner   | train t | train t + 1 | train t + 2 | ...

The completions of one prompt are a group, and each group has its own thread. The thread
runs the environments and the rewards of the group, and asks the engine for actions
(engine_loop.py). Batches start and are trained in the order of the data, so nothing is
discarded and no length is favored. The rule of admission bounds the age of every token,
see `schedule.admissible`.

Only one thing depends on timing: which requests and weights the engine takes before
each launch. The journal (journal.py) records these decisions. After a kill, groups that
had ended are read from the journal, and the others start again. A replay takes the same
decisions before the same launches, so that the engine computes the same bytes.

Each of several processes has an engine and a journal, and samples its share of every
batch. The processes exchange a batch when it is complete. All processes start their
engines and copy weights in the same steps, because all take part in each copy.
"""

from __future__ import annotations

import json
import logging
import pathlib
import threading
import time
from typing import Any

import jax
from jax.sharding import Mesh

from tunix.models import calling
from tunix.rl.common import Rollouts
from tunix.rl.experience import rollout_codec
from tunix.rl.experience.experience import check_same_prompts
from tunix.rl.pipeline import PromptBatch
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.schedules import journal as journal_lib
from tunix.rl.schedules.deciders import Live, Replayed
from tunix.rl.schedules.decisions import Abandoned, Decider, GroupClient, GroupEnd
from tunix.rl.schedules.engine_loop import EngineLoop
from tunix.rl.schedules.jobs import Job
from tunix.rl.schedules.journal import FOLDER, Journal, JournalError
from tunix.rl.schedules.schedule import Ahead
from tunix.rl.weights import local_arrays
from tunix.sft.metrics_logger import Mode
from tunix.utils import coordination, mesh as mesh_lib

_log = logging.getLogger(__name__)

_LAUNCH_S = 3600.0  # longest launch of a replay; it may include compilation
_CLOSE_S = 60.0  # longest wait for the threads to end, when they are stopped


class Greedy(Ahead):
  """The schedule that keeps an engine full, up to `lag` batches ahead; see `Ahead`.

  Args:
    max_tokens: largest number of tokens of a prompt and all tokens after it together.
    generations: completions of a prompt.
    folder: folder of the checkpoints; the journal is in it. None: there is no journal.
    replay: folder of a journal to repeat. None: this run takes its own decisions.

  Raises:
    ValueError: the rollout engine has no stream, see `BaseRollout.check_stream`.
    RecordError: the journal is damaged.
    JournalError: the journal belongs to another run.
    FileNotFoundError: there is no journal to repeat.
  """

  name = "greedy"

  def __init__(
    self,
    cluster: RLCluster,
    *args: Any,
    max_tokens: int,
    generations: int,
    folder: str | None,
    replay: str | None,
    **options: Any,
  ):
    super().__init__(cluster, *args, **options)
    self._rollout = cluster.rollout
    self._rollout.check_stream()
    self._max_tokens, self._generations = max_tokens, generations
    self._journal: Journal | None = None
    self._replayed: Journal | None = None
    if replay is not None:
      self._replayed = Journal(journal_lib.folder_of(pathlib.Path(replay)), reads=True)
      self._decider: Decider = Replayed(self._replayed, self._timeout_s)
      # `Replayed` raises an error that names what is missing. The learner's own limit
      # is longer: it ends a launch that never returns.
      self._timeout_s += _LAUNCH_S
    else:
      if folder is not None:
        base = pathlib.Path(folder) / FOLDER
        self._journal = Journal(journal_lib.folder_of(base))
      self._decider = Live(self._journal)
    sampling = cluster.cluster_config.rollout(Mode.TRAIN)
    if (journal := self._journal or self._replayed) is not None:
      settings: dict[str, Any] = {"lag": self._lag, "generations": generations}
      settings["seed"] = sampling.seed
      if sampling.weights is not None:
        settings["weights"] = sampling.weights
      if self._has_others:
        settings["processes"] = jax.process_count()
      if self._rollout.engine_count > 1:
        settings["engines"] = self._rollout.engine_count
      journal.check(settings)
    if self._journal is not None:
      self._journal.decisions.clear()  # only a replay needs them
    self._loop: EngineLoop | None = None
    self._threads: list[threading.Thread] = []

  # The learner's thread.

  def begin(self) -> None:
    self._stop()
    self._check_first_weights()
    super().begin()
    for job in self._jobs:  # groups may have ended just before their threads stopped
      job.read_ends(self._journal)

  def _check_first_weights(self) -> None:
    """Checks that the run of the journal began with the same weights.

    Resumed runs are not checked here, because a checkpoint has its own stamp.

    Raises:
      JournalError: the run of the journal began with other weights.
    """
    first = None if self._journal is None else self._journal.first_stamp
    stamp = self._cluster.version.stamp
    if first not in (None, stamp) and not self._cluster.actor_trainer.train_steps:
      raise JournalError(
        f"{self._journal and self._journal.folder} belongs to a run that began with "
        f"other weights (their stamp is {first}, and the stamp of these is {stamp}): "
        "use the model of that run, or another folder"
      )

  def _job(self, batch: PromptBatch, number: int) -> Job:
    check_same_prompts(batch, Mode.TRAIN)
    return self._read(Job.of_prompts(batch, number))

  def _read(self, job: Job) -> Job:
    job.read_ends(self._journal)
    return job

  def _start(self, new: list[Job]) -> None:
    # A resumed run first makes the updates whose batches are complete, without an
    # engine. The engine then starts with weights that are at least as new as the last
    # ones before the kill.
    if self._loop is None and self._is_engine_needed():
      self._start_loop(self._prompts_of_first_batch())
    if self._loop is not None:
      with self._changed:
        self._start_groups()

  def _is_engine_needed(self) -> bool:
    """Returns True if any process lacks rollouts of the first batch."""
    missing = bool(self._jobs[0].missing)
    return any(coordination.gather("prompts that are missing", missing))

  def _complete(self, job: Job) -> None:
    self._exchange(job) if self._has_others else super()._complete(job)

  def _result(self, job: Job) -> Rollouts:
    self._note_timings(job)
    measured = self._experience.measured
    # Groups are kept without their pixels, which are read from the files again.
    rollouts = self._experience.with_images(job.whole)
    return self._experience.shaped(rollouts, self._shape_rewards, measured)

  @property
  def _has_others(self) -> bool:
    return jax.process_count() > 1

  def _exchange(self, job: Job) -> None:
    """Waits for the rollouts of this process, and exchanges them with the others.

    Raises:
      AbsentError: another process failed, or did not take part in time.
      TypeError: a column of the data or a message of an environment is not JSON.
    """
    rollout, complete = self._rollout, super()._complete

    def mine() -> list[Any]:
      complete(job)
      return job.share()

    job.take_shares(rollout.exchange("rollouts", mine))
    self._experience.phases.add("exchange_wait", rollout.take_waited())

  def _note_timings(self, job: Job) -> None:
    phases, now = self._experience.phases, time.monotonic()
    parts = [part for part in job.parts if part is not None]
    ages = [now - part.ended_at for part in parts if part.ended_at]
    phases.add("queue_age", sum(ages) / max(1, len(ages)))
    missing = sum(len(job.missing) for job in self._jobs)
    phases.note("episodes_in_flight", float(missing * self._generations))
    phases.add("engine_idle", 0.0 if self._loop is None else self._loop.take_idle())

    # Prompts are sampled at the same time, so the longest time counts. Rewards are
    # computed for one prompt after the other, so the sum counts.
    def each(name):
      return [part.phases.seconds.get(name, 0.0) for part in parts]

    phases.add("rollout", max(each("rollout"), default=0.0))
    phases.add("rewards", sum(each("rewards")))

  def _sample_evaluation(self, batch: PromptBatch, number: int) -> Rollouts:
    """Samples with the rollout's own engine, while the engine of the loop is paused."""
    self._cluster.load_weights(self._cluster.weights())
    if self._loop is None:
      return self._sampled_here(batch, number)
    with self._experience.phases("data_wait"):
      self._loop.park(self._timeout_s)
    try:
      return self._sampled_here(batch, number)
    finally:
      self._loop.go_on()

  def _sampled_here(self, batch: PromptBatch, number: int) -> Rollouts:
    return self._experience.rollouts(batch, Mode.EVAL, number, self._shape_rewards)

  def commit(self) -> None:
    super().commit()
    if self._loop is not None:
      self._loop.offer(self._cluster.weights())

  def end(self) -> None:
    self._stop()
    super().end()

  def to_json(self) -> list[Any] | None:
    """Returns the prompts of batches that are ahead; rollouts are in the journal."""
    if self._journal is not None:
      self._journal.sync()
    return [job.to_json() for job in self._kept]

  def _from_json(self, saved: Any) -> Job:
    return self._read(Job.of_prompts(PromptBatch(**saved["batch"]), saved["number"]))

  def close(self) -> None:
    self._stop()
    for journal in (self._journal, self._replayed):
      if journal is not None:
        journal.close()
    self._journal = self._replayed = None

  def _prompts_of_first_batch(self) -> int:
    """Returns this process's number of prompts of batch 0, which sizes all engines.

    After a kill, the engine must have its earlier size: the size changes the last bits
    of log-probabilities, and a replay uses one size for the whole run. The journal
    therefore gives the size: the present batch may be the last one of the data, which
    may be smaller. If there is no journal, or if the journal has no group of batch 0,
    the present batch gives the size.
    """
    groups = {} if self._journal is None else self._journal.ends
    size = sum(batch == 0 for batch, _ in groups)
    job = self._jobs[0]
    own = max(1, len(job.mine))
    return (size or own) if job.number else own

  def _start_loop(self, prompts: int) -> None:
    """Starts the engine's thread with the present weights."""
    rows = prompts * self._generations * (self._lag + 1)
    config = self._cluster.cluster_config.rollout(Mode.TRAIN)
    self._loop = EngineLoop(
      lambda: self._rollout.sampling_stream(config, rows, self._max_tokens),
      self._decider,
      self._changed,
      on_end=self._take,
      on_start=self._start_again,
      is_needed=lambda: self._is_waiting,
      vocab_size=calling.vocab_size(self._cluster.actor),
      mesh=self._rollout.mesh,
    )
    self._loop.offer(self._cluster.weights())
    self._loop.start()

  def _stop(self) -> None:
    """Ends the threads. Groups that have not ended are sampled again."""
    if self._loop is None:
      return
    until = time.monotonic() + min(_CLOSE_S, self._timeout_s)

    def left():
      return max(0.0, until - time.monotonic())

    with self._changed:
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

  def _last_move(self, job: Job) -> float:
    assert self._loop is not None  # `_start` has made it for an incomplete job
    if self._loop.failure is not None:
      raise self._loop.failure
    return self._loop.moved

  # In the learner's or the engine's thread, which holds `_changed`.

  def _start_groups(self) -> None:
    for job in self._jobs:
      key = local_arrays.key_here(self._experience.key(job.batch, job.number))
      for prompt in job.missing:
        if prompt not in job.clients:
          self._start_group(job, prompt, key)

  def _start_group(self, job: Job, prompt: int, key: jax.Array) -> None:
    assert self._loop is not None
    first = prompt * self._generations
    client = GroupClient(self._loop, (job.number, prompt), key, first)
    job.clients[prompt] = client
    thread = threading.Thread(
      target=self._run_group,
      args=(job.batch.take([prompt]), client, self._loop, mesh_lib.current_mesh()),
      name="tunix-greedy-group",
      daemon=True,
    )
    self._threads = [t for t in self._threads if t.is_alive()]
    self._threads.append(thread)
    thread.start()

  def _take(self, end: GroupEnd) -> None:
    for job in self._jobs:
      if job.number == end.client.group[0]:
        job.take(end)

  def _abandon(self) -> None:
    for job in {id(job): job for job in [*self._jobs, *self._kept]}.values():
      for client in job.clients.values():
        client.cancel()
      job.clients.clear()

  def _start_again(self) -> None:
    """Restarts every group that has not ended, as a restarted process does."""
    self._abandon()
    self._start_groups()

  # The thread of a group.

  def _run_group(
    self, batch: PromptBatch, client: GroupClient, loop: EngineLoop, mesh: Mesh | None
  ) -> None:
    try:
      with mesh_lib.use_mesh(mesh):
        rollouts = self._experience.sample_group(batch, client, client.phases)
      content, offset = None, 0
      if self._journal is not None or self._replayed is not None:
        content = json.loads(json.dumps(rollout_codec.to_json(rollouts)))
      if client.is_abandoned:
        return
      if self._journal is not None:
        offset = self._journal.store(content)
      client.hand_in(rollouts, content, offset)
    except Abandoned:
      pass
    except BaseException as error:
      # `Ahead.rollouts` raises the error in the learner's thread.
      if not client.is_abandoned:
        loop.fail(error)
