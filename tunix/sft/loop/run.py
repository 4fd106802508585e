"""The training loop of SFT, preference training, distillation and RL.

    unit = draw(source)                a global batch; in RL, the source of prompts
    while unit is not None:
      learn(unit)
      unit = draw(source)
      evaluate, save, stop             if the cadence or a signal requires it

A `Work` decides what a unit is and how it is trained, evaluated and saved. `Run`
decides when each of these happens.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar, Literal, Protocol

import jax

from tunix.perf.trace import NoopTracer
from tunix.sft import best as best_lib
from tunix.sft.best import Best
from tunix.sft.checkpoint_manager import CheckpointManager
from tunix.sft.config import TrainingConfig
from tunix.sft.loop import doubts
from tunix.sft.loop.interrupts import DeferredSignals, Stopped
from tunix.sft.metrics_logger import MetricsLogger
from tunix.sft.steps.run_state import Position, RunState
from tunix.utils import coordination, mesh as mesh_lib, terminal

_log = logging.getLogger(__name__)

Places = list[dict[str, Any] | None]
Session = contextlib.AbstractContextManager[DeferredSignals]


class Source(Protocol):
  """The source of a run's units: a `BatchSource`, or RL's `PromptSource`."""

  @property
  def drawn(self) -> int:
    """The number of batches drawn since the run began."""
    ...

  def remember(self) -> None:
    """Stores the current place in the data, for a checkpoint that is taken later."""

  def state(self, drawn: int) -> dict[str, Any]:
    """Returns the place after `drawn` batches, as JSON."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
  """The result of a call of `train`.

  Attributes:
    steps: optimizer updates of the run, including those of earlier calls and processes.
    ended_by: the reason for the end: "data" (no batch was left), "max_steps" or
      "early_stopping".
    best: the best evaluation of the run; None if `TrainingConfig.best` is None.
    notes: warnings about the run: the gradient was 0 in every step, the metrics show
      that it did not learn (see doubts.py), or the data ended before `max_steps`.
  """

  steps: int
  ended_by: Literal["data", "max_steps", "early_stopping"]
  best: Best | None = None
  notes: tuple[str, ...] = ()

  def __str__(self) -> str:
    parts = [terminal.counted(self.steps, "step")]
    if self.best is not None:
      parts.append(str(self.best))
    if self.best is not None and self.ended_by == "early_stopping":
      waited = terminal.counted(self.best.waited, "evaluation")
      parts.append(f"stopped early: no better one in {waited}")
    return "; ".join([*parts, *self.notes])


class Work(Protocol):
  """The interface between a `Run` and the trainer or learner that it drives.

  `PeftTrainer` and `RLLearner` implement it. A unit is the input of one `_learn` call:
  a global batch in a trainer, the source of prompts in RL. The methods start with an
  underscore because only `Run` calls them, not the users of a trainer.
  """

  # The metric that ranks evaluations, and True if a larger value is better.
  _main_metric: ClassVar[tuple[str, bool]] = ("loss", False)
  # The likely cause of a gradient that is 0 in every step.
  _cause_of_no_gradient: ClassVar[str] = (
    "the loss does not depend on the trained parameters, or it is constant"
  )

  @property
  def _no_doubts(self) -> Collection[str]:
    """The metrics that `doubts` must ignore in this run."""
    return ()

  @property
  @abc.abstractmethod
  def train_steps(self) -> int:
    """The number of optimizer updates so far; in RL, updates of the actor."""

  @property
  @abc.abstractmethod
  def metrics_logger(self) -> MetricsLogger:
    """The logger of the run's metrics."""

  @property
  @abc.abstractmethod
  def _position(self) -> Position:
    """The counters and the place in the data; `Run` writes some of its fields."""

  @property
  @abc.abstractmethod
  def _had_no_gradient(self) -> bool:
    """True if the gradient was 0 in every update so far."""

  @abc.abstractmethod
  def _session(self) -> Session:
    """Returns a context for one call of `train`; it yields the deferred signals."""

  @abc.abstractmethod
  def _open(self, train_ds: object, previous: object) -> Source:
    """Returns the source of units, placed at the run's position in the data.

    Args:
      train_ds: the data that the caller of `train` gave.
      previous: the source of an interrupted call; None if there is none.
    """

  @abc.abstractmethod
  def _begin(self) -> None:
    """Prepares a call of `train`, after `_open` and inside the session."""

  @abc.abstractmethod
  def _end(self) -> None:
    """Completes a call of `train` that was not interrupted."""

  @abc.abstractmethod
  def _draw(self, source: object) -> Any:
    """Returns the next unit of `source`; None at the end of the data."""

  @abc.abstractmethod
  def _learn(self, unit: object, skip_jit: bool) -> Any:
    """Makes the updates of one unit; advances `train_steps` and `_position`."""

  @abc.abstractmethod
  def _evaluate(
    self, eval_ds: object, skip_jit: bool, signals: DeferredSignals
  ) -> Mapping[str, float] | None:
    """Returns metrics by name; None if there is no evaluation data."""

  @abc.abstractmethod
  def _run_state(self, places: Places) -> RunState | None:
    """Returns the state to save; None if the run must not be saved now.

    Args:
      places: each process's place in the data.
    """

  @abc.abstractmethod
  def _state_form(self) -> RunState:
    """Returns a state with the shapes, dtypes and shardings of the saved arrays."""

  @abc.abstractmethod
  def _load(self, saved: tuple[int, RunState] | None) -> None:
    """Continues from a checkpoint.

    Args:
      saved: (step, state) of the checkpoint; None if there is no checkpoint.
    """


class Run:
  """Drives a Work: calls of `train`, evaluations, checkpoints and signals.

  Args:
    work: the trainer or learner.
    config: the limits, the cadence of evaluations and checkpoints, and their folder.
    tracer: receives the spans of the phases.
  """

  def __init__(self, work: Work, config: TrainingConfig, tracer: NoopTracer):
    self._work = work
    self.config = config
    self._tracer = tracer
    self._checkpoints = CheckpointManager(
      config.checkpoint_root_directory, config.checkpointing_options, self._best_step
    )
    self._source: Source | None = None  # of a call that has not ended yet
    # All processes must stop at the same step, but each may have dispatched up to
    # `max_inflight_computations` steps ahead. So a process that receives a signal names
    # a later step, which no process has passed yet.
    self._notice = coordination.StopNotice(lag=config.max_inflight_computations + 2)
    self._calls = 0  # completed calls of `train` in this process
    self._units = 0  # learned in this process
    self._doubted: set[str] = set()  # metrics whose notes were already logged
    self._is_training = False
    self._cadence_checked_until = 0  # the last step that `_save_is_due` has checked

  def train(self, train_ds: object, eval_ds: object, skip_jit: bool) -> TrainResult:
    """Trains to the end of the data, `max_steps` or an early stop.

    See `PeftTrainer.train`. A script that is started again repeats all of its calls of
    `train`. Calls that were complete when the checkpoint was saved return at once, and
    the interrupted call continues.

    Raises:
      Stopped: SIGINT or SIGTERM arrived. The current update is finished and saved.
      ValueError: The data is empty.
      RuntimeError: The run is closed and cannot save; or a hook called `train` during
        training.
      coordination.AbsentError: Another process did not take part in a checkpoint.
    """
    if self._is_training:
      raise RuntimeError(
        "train was called while this trainer trains, by a hook or another of your "
        "functions. Call train_step there, or train after the first call has returned."
      )
    self._is_training = True
    try:
      self._train(train_ds, eval_ds, skip_jit)
    finally:
      self._is_training = False
    return self._result()

  def _train(self, train_ds: object, eval_ds: object, skip_jit: bool) -> None:
    work = self._work
    self._checkpoints.check_open()
    if self._calls < work._position.calls:
      self._calls += 1
      _log.info("call %d of train was complete before: it is skipped", self._calls)
      return
    if self._is_over:
      _log.info("this run stopped early: %s", self._result())
    work._position.data_state = self._place()
    # `_open` can take long: without a saved iterator state, it draws and drops all
    # batches that were consumed. It runs before the session, which defers Ctrl-C, so
    # that Ctrl-C ends it at once.
    source = self._source = work._open(train_ds, self._source)
    with work._session() as signals:
      work._begin()
      unit = self._draw(source)
      if unit is None and not source.drawn and not self.is_finished:
        raise ValueError(
          "the training data gave no batch: it is empty, or a generator that an "
          "earlier loop has exhausted"
        )
      # This is the evaluation before the first step. In a resumed run, it is the one of
      # the restored step, if the checkpoint was saved before that evaluation.
      self._evaluate_if_due(eval_ds, skip_jit, signals, last=unit is None)
      while unit is not None and not self._is_over:
        work._learn(unit, skip_jit)
        self._look_for_doubts()
        self.stop_if_signalled(signals)
        # The checkpoint is written below, after the next unit is drawn. It must have
        # the place in the data before that unit, so this place is stored now.
        if due := self._save_is_due():
          source.remember()
        # The next unit is drawn while the device computes the update. Evaluations and
        # saves come later, because they wait for the device.
        with self.saved_on_failure():
          unit = self._draw(source)
        self._evaluate_if_due(eval_ds, skip_jit, signals, last=unit is None)
        if due or unit is None or self._is_over or self._is_best:
          self.save()
        self.stop_if_signalled(signals)
      self._end_of_call()
      work._end()
    for note in self._notes():
      _log.warning("%s", note)

  @property
  def is_finished(self) -> bool:
    """True if the run has reached `max_steps` or has stopped early."""
    limit = self.config.max_steps
    return self._is_over or (limit is not None and self._work.train_steps >= limit)

  @property
  def _is_over(self) -> bool:
    """True if the run has stopped early.

    The value is computed from the position. A checkpoint has the position, so a resumed
    run stays stopped.
    """
    record, options = self._record, self.config.best
    return (
      record is not None and options is not None and best_lib.is_over(record, options)
    )

  @property
  def _is_best(self) -> bool:
    """True if the current step has the best evaluation."""
    return self._best_step() == self._work.train_steps

  def _best_step(self) -> int | None:
    return None if (record := self._record) is None else record.step

  @property
  def _record(self) -> Best | None:
    """The record of the best evaluation; None if `TrainingConfig.best` is None."""
    if (options := self.config.best) is None:
      return None
    saved = self._work._position.best
    return best_lib.record_for(options, self._work._main_metric, saved)

  def _result(self) -> TrainResult:
    ended = "max_steps" if self.is_finished else "data"
    return TrainResult(
      steps=self._work.train_steps,
      ended_by="early_stopping" if self._is_over else ended,
      best=self._record,
      notes=tuple(self._notes()),
    )

  def _notes(self) -> Iterator[str]:
    steps, limit = self._work.train_steps, self.config.max_steps
    if self._work._had_no_gradient:
      cause = self._work._cause_of_no_gradient
      every = f"{'all ' * (steps > 1)}{terminal.counted(steps, 'step')}"
      yield f"nothing was learned: the gradient was 0 in {every}; {cause}"
    else:
      yield from self._doubts().values()
    if limit is not None and not self.is_finished:
      yield (
        f"the data ended after {terminal.counted(steps, 'step')}, and max_steps is "
        f"{limit}; repeat the data, or call train again, to reach max_steps"
      )

  def _doubts(self) -> dict[str, str]:
    work, prefix = self._work, self.config.metrics_prefix
    return doubts.notes(work.metrics_logger, prefix, work._no_doubts)

  def _look_for_doubts(self) -> None:
    """Logs new signs that the run does not learn; each sign is logged only once."""
    self._units += 1
    if self._units & (self._units - 1):
      return  # checks only after 1, 2, 4, 8, ... units: a check reads all values
    for metric, note in self._doubts().items():
      if metric not in self._doubted:
        _log.warning("after step %d: %s", self._work.train_steps, note)
      self._doubted.add(metric)

  def _draw(self, source: object) -> Any:
    if self.is_finished:
      return None
    with self._tracer.span_group("data"), coordination.alone("its data"):
      return self._work._draw(source)

  def _evaluate_if_due(
    self, eval_ds: object, skip_jit: bool, signals: DeferredSignals, *, last: bool
  ) -> None:
    step, position = self._work.train_steps, self._work._position
    done, every = position.evaluated_at, self.config.eval_every_n_steps
    # In RL, one unit makes several updates, so `step` can pass a multiple of `every`
    # without being equal to it. `step % every == 0` would miss this evaluation.
    crossed = every is not None and step // every > done // every
    if done < 0 or crossed or (last and done < step):
      self._judge(self._work._evaluate(eval_ds, skip_jit, signals))
      position.evaluated_at = step

  def _judge(self, metrics: Mapping[str, float] | None) -> None:
    """Updates the record of the best evaluation.

    All processes have the same metrics, so all of them decide alike.
    """
    options, record, step = self.config.best, self._record, self._work.train_steps
    if options is None or record is None:
      return
    value = best_lib.value_of(record, metrics)
    # At step 0, the metrics are those of the model before training.
    if step:
      self._work._position.best = best_lib.judge(record, options, step, value)
    if self._is_over:
      _log.info("stopped early after step %d: %s", step, self._record)

  def _end_of_call(self) -> None:
    """Waits for the last checkpoint, and prepares the position for the next call."""
    self._checkpoints.wait()
    self._checkpoints.prune()
    self._calls += 1
    self._source = None
    if not self.is_finished:
      position = self._work._position
      position.calls = self._calls
      position.rewind()

  def stop_if_signalled(self, signals: DeferredSignals) -> None:
    """Saves and raises Stopped if this or another process has received a signal.

    Raises:
      Stopped: A signal has arrived.
    """
    step = self._work.train_steps
    if (signum := self._notice.due(signals.pending, step)) is None:
      return
    saved = self.save() or self.saved_step() is not None
    self._checkpoints.wait()
    outcome = "a checkpoint is saved" if saved else "nothing is saved"
    if self.config.checkpoint_root_directory is None:
      outcome = "no checkpoint folder was given"
    raise Stopped(signum, f"stopped after step {step}; {outcome}")

  @contextlib.contextmanager
  def saved_on_failure(self) -> Iterator[None]:
    """Saves the updates so far if the block fails, and raises the error again."""
    try:
      yield
    except BaseException:  # includes KeyboardInterrupt
      # A save needs all processes. With several, the others have not failed, so they do
      # not take part.
      if jax.process_count() == 1:
        self.save()
      raise

  def save(self) -> bool:
    """Saves the run unless this step is already saved; returns True if it saved it."""
    step = self._work.train_steps
    if self.config.checkpoint_root_directory is None or step == self.saved_step():
      return False
    purpose, timeout = f"the checkpoint of step {step}", self._checkpoints.timeout_secs
    with self._tracer.span_group("checkpoint"):
      places = coordination.gather(
        purpose, self._place(), timeout, topic="places of checkpoints"
      )
      state = self._work._run_state(places)
      return state is not None and self._checkpoints.save_state(step, state, force=True)

  def _place(self) -> dict[str, Any] | None:
    """Returns the run's place in the data; None before the first batch.

    The iterator's state is read here and not at every step, because it can be as large
    as the data.
    """
    place = self._work._position.data_state
    if place is None or self._source is None:
      return place
    return self._source.state(place["drawn"])

  def _save_is_due(self) -> bool:
    # Looks at every step since the last call: in RL one unit makes several updates.
    step = self._work.train_steps
    first = max(self._cadence_checked_until, self.saved_step() or 0) + 1
    self._cadence_checked_until = step
    return any(self._checkpoints.should_save(s) for s in range(first, step + 1))

  def saved_step(self) -> int | None:
    """Returns the step of the newest checkpoint; None if there is none."""
    return self._checkpoints.latest_step()

  def restore(self) -> bool:
    """Restores the newest checkpoint; see `BaseTrainer.restore_checkpoint`."""
    form = self._work._state_form()
    with mesh_lib.use_mesh(mesh_lib.mesh_of(form.model_params)):
      saved = self._checkpoints.restore_state(form)
    self._work._load(saved)
    return saved is not None

  def close(self) -> None:
    """Saves the last step if it is not saved yet, and waits for the write.

    Raises:
      OSError: The last checkpoint could not be written.
    """
    if (self.saved_step() or 0) < self._work.train_steps:
      self.save()
    self._checkpoints.close()
