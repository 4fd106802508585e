"""A run: what SFT, preferences, distillation and RL share around their updates.

    unit = draw(source)                a global batch; in RL, that there are prompts
    while unit is not None:
      update(unit)
      unit = draw(source)
      evaluate, save, stop             when it is time

A `Work` decides what is drawn, learnt, evaluated and saved; `Run` decides when.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Protocol

import jax

from tunix.perf.trace import NoopTracer
from tunix.sft import best as best_lib
from tunix.sft.best import Best
from tunix.sft.checkpoint_manager import CheckpointManager
from tunix.sft.config import TrainingConfig
from tunix.sft.interrupts import DeferredSignals, Stopped
from tunix.sft.run_state import Position, RunState
from tunix.utils import coordination, mesh as mesh_lib

_log = logging.getLogger(__name__)

Places = list[dict[str, Any] | None]
Session = contextlib.AbstractContextManager[DeferredSignals]


class Source(Protocol):
  """What units are drawn from: `BatchSource`, or RL's `PromptSource`."""

  @property
  def drawn(self) -> int:
    """Batches drawn since the run began."""
    ...

  def remember(self) -> None:
    """Notes this place, before more is drawn: a checkpoint of it is due."""
    ...

  def state(self, drawn: int) -> dict[str, Any]:
    """The place after `drawn` batches, as JSON."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
  """How a call of `train` ended.

  Attributes:
    steps: optimizer updates of the run, those of earlier calls and processes included.
    ended_by: "data" (it ended), "max_steps" or "early_stopping".
    best: the best evaluation of the run; None where `TrainingConfig.best` is not set.
  """

  steps: int
  ended_by: Literal["data", "max_steps", "early_stopping"]
  best: Best | None = None

  def __str__(self) -> str:
    parts = [f"{self.steps} steps"]
    if self.best is not None:
      parts.append(str(self.best))
    if self.best is not None and self.ended_by == "early_stopping":
      parts.append(f"stopped early: no better one in {self.best.waited} evaluations")
    return "; ".join(parts)


class Work(Protocol):
  """The interface between a `Run` and the trainer or learner that it drives.

  `PeftTrainer` and `RLLearner` implement it. A unit is the input of one `_learn` call:
  a global batch in a trainer, the source of prompts in RL. The methods start with an
  underscore because only `Run` calls them, not the users of a trainer.
  """

  # The metric that ranks evaluations, and True if a larger value is better.
  _main_metric: ClassVar[tuple[str, bool]] = ("loss", False)

  @property
  @abc.abstractmethod
  def train_steps(self) -> int:
    """The number of optimizer updates so far; in RL, updates of the actor."""
    ...

  @property
  @abc.abstractmethod
  def _position(self) -> Position:
    """The counters and the place in the data; `Run` writes some of its fields."""
    ...

  @abc.abstractmethod
  def _session(self) -> Session:
    """Returns a context for one call of `train`; it yields the deferred signals."""
    ...

  @abc.abstractmethod
  def _open(self, train_ds: Any, previous: Any) -> Source:
    """Returns the source of units, placed at the run's position in the data.

    Args:
      train_ds: the data that the caller of `train` gave.
      previous: the source of an interrupted call; None if there is none.
    """
    ...

  @abc.abstractmethod
  def _begin(self) -> None:
    """Prepares a call of `train`, after `_open` and inside the session."""
    ...

  @abc.abstractmethod
  def _end(self) -> None:
    """Completes a call of `train` that was not interrupted."""
    ...

  @abc.abstractmethod
  def _draw(self, source: Any) -> Any:
    """Returns the next unit of `source`; None at the end of the data."""
    ...

  @abc.abstractmethod
  def _learn(self, unit: Any, skip_jit: bool) -> Any:
    """Makes the updates of one unit; advances `train_steps` and `_position`."""
    ...

  @abc.abstractmethod
  def _evaluate(
    self, eval_ds: Any, skip_jit: bool, signals: DeferredSignals
  ) -> Mapping[str, float] | None:
    """Returns metrics by name; None if there is no evaluation data."""
    ...

  @abc.abstractmethod
  def _run_state(self, places: Places) -> RunState | None:
    """Returns the state to save; None if the run must not be saved now.

    Args:
      places: each process's place in the data.
    """
    ...

  @abc.abstractmethod
  def _state_form(self) -> RunState:
    """Returns a state with the shapes, dtypes and shardings of the saved arrays."""
    ...

  @abc.abstractmethod
  def _load(self, saved: tuple[int, RunState] | None) -> None:
    """Continues from a checkpoint.

    Args:
      saved: (step, state) of the checkpoint; None if there is no checkpoint.
    """
    ...


class Run:
  """Drives a Work: calls of `train`, cadence, checkpoints, signals.

  Args:
    work: what is done.
    config: limits and cadence; where checkpoints go.
    tracer: notes the phases.
  """

  def __init__(self, work: Work, config: TrainingConfig, tracer: NoopTracer):
    self._work = work
    self.config = config
    self._tracer = tracer
    self._checkpoints = CheckpointManager(
      config.checkpoint_root_directory, config.checkpointing_options, self._best_step
    )
    self._source: Source | None = None  # of the call that is not over
    self._notice = coordination.StopNotice(lag=config.max_inflight_computations + 2)
    self._calls = 0  # calls of `train` that this process has behind it
    self._is_training = False  # in a call of `train`
    self._asked_until = 0  # the last step for which the save cadence was asked

  def train(self, train_ds: Any, eval_ds: Any, skip_jit: bool) -> TrainResult:
    """One call of `train`: from where the run stands to its end, or that of the data.

    A script that is run again makes all its calls again: those that were over return at
    once.

    Raises:
      Stopped: SIGINT or SIGTERM arrived; the update was finished and the run saved.
      ValueError: the data is empty.
      RuntimeError: the run is closed, and could save nothing; or it is training, and
        was called from a hook.
      coordination.AbsentError: another process did not come to a checkpoint.
    """
    if self._is_training:
      raise RuntimeError(
        "train was called while this trainer trains, by a hook or a function of yours: "
        "call train_step there, or train after the first call has returned"
      )
    self._is_training = True
    try:
      self._train(train_ds, eval_ds, skip_jit)
    finally:
      self._is_training = False
    return self._result()

  def _train(self, train_ds: Any, eval_ds: Any, skip_jit: bool) -> None:
    work = self._work
    self._checkpoints.check_open()
    if self._calls < work._position.calls:
      self._calls += 1
      _log.info("call %d of train was over before: nothing to do", self._calls)
      return
    if self._is_over:
      _log.info("this run has stopped early: %s", self._result())
    work._position.data_state = self._place()
    # Outside the session: skipping through data can take long, and Ctrl-C ends it.
    source = self._source = work._open(train_ds, self._source)
    with work._session() as signals:
      work._begin()
      unit = self._draw(source)
      if unit is None and not source.drawn and not self.is_finished:
        raise ValueError(
          "the training data gave no batch: it is empty, or a generator that an "
          "earlier loop has used up"
        )
      # Before the first step; or where a checkpoint was taken before the evaluation.
      self._evaluate_if_due(eval_ds, skip_jit, signals, last=unit is None)
      while unit is not None and not self._is_over:
        work._learn(unit, skip_jit)
        self.stop_if_asked(signals)
        if due := self._save_is_due():
          source.remember()
        # Drawn before anything waits for the device, which is busy with the update.
        with self.saved_on_failure():
          unit = self._draw(source)
        self._evaluate_if_due(eval_ds, skip_jit, signals, last=unit is None)
        if due or unit is None or self._is_over or self._is_best:
          self.save()
        self.stop_if_asked(signals)
      self._end_of_call()
      work._end()

  @property
  def is_finished(self) -> bool:
    """Whether `max_steps` is reached, or patience is at its end."""
    limit = self.config.max_steps
    return self._is_over or (limit is not None and self._work.train_steps >= limit)

  @property
  def _is_over(self) -> bool:
    """Read off the position, which is saved: a run that stopped early stays stopped."""
    record, options = self._record, self.config.best
    return (
      record is not None and options is not None and best_lib.is_over(record, options)
    )

  @property
  def _is_best(self) -> bool:
    """Whether the run stands at its best evaluation."""
    return self._best_step() == self._work.train_steps

  def _best_step(self) -> int | None:
    return None if (record := self._record) is None else record.step

  @property
  def _record(self) -> Best | None:
    """Of the best evaluation; None where nobody asks for it."""
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
    )

  def _draw(self, source: Any) -> Any:
    if self.is_finished:
      return None
    with self._tracer.span_group("data"), coordination.alone("its data"):
      return self._work._draw(source)

  def _evaluate_if_due(
    self, eval_ds: Any, skip_jit: bool, signals: DeferredSignals, *, last: bool
  ) -> None:
    step, position = self._work.train_steps, self._work._position
    done, every = position.evaluated_at, self.config.eval_every_n_steps
    # Not `step % every`: a batch of rollouts makes several updates, which may step over
    # a multiple.
    crossed = every is not None and step // every > done // every
    if done < 0 or crossed or (last and done < step):
      self._judge(self._work._evaluate(eval_ds, skip_jit, signals))
      position.evaluated_at = step

  def _judge(self, metrics: Mapping[str, float] | None) -> None:
    """Notes how good an evaluation was; all processes have the same metrics."""
    options, record, step = self.config.best, self._record, self._work.train_steps
    if options is None or record is None:
      return
    value = best_lib.value_of(record, metrics)
    # Before the first step it is of the model as given, and no result of the run.
    if step:
      self._work._position.best = best_lib.judge(record, options, step, value)
    if self._is_over:
      _log.info("stopped early after step %d: %s", step, self._record)

  def _end_of_call(self) -> None:
    """Everything of this call is on disk; the next one starts the data anew."""
    self._checkpoints.wait()
    self._checkpoints.prune()
    self._calls += 1
    self._source = None
    if not self.is_finished:
      position = self._work._position
      position.calls = self._calls
      position.rewind()

  def stop_if_asked(self, signals: DeferredSignals) -> None:
    """Saves and leaves when a signal has arrived, at this process or at another.

    Raises:
      Stopped: one has.
    """
    step = self._work.train_steps
    if (signum := self._notice.due(signals.pending, step)) is None:
      return
    saved = self.save() or self.saved_step() is not None
    self._checkpoints.wait()
    where = "a checkpoint is saved" if saved else "nothing is saved"
    if self.config.checkpoint_root_directory is None:
      where = "no checkpoint folder was given"
    raise Stopped(signum, f"stopped after step {step}; {where}")

  @contextlib.contextmanager
  def saved_on_failure(self) -> Iterator[None]:
    """Saves the updates that were done before an exception goes on its way."""
    try:
      yield
    except BaseException:  # also Ctrl-C: it is raised again
      # Saving is done by all processes, and the others have not failed.
      if jax.process_count() == 1:
        self.save()
      raise

  def save(self) -> bool:
    """Saves the run, unless this step is saved; returns whether it did."""
    step = self._work.train_steps
    if self.config.checkpoint_root_directory is None or step == self.saved_step():
      return False
    what, wait = f"the checkpoint of step {step}", self._checkpoints.timeout_secs
    with self._tracer.span_group("checkpoint"):
      state = self._work._run_state(coordination.gather(what, self._place(), wait))
      return state is not None and self._checkpoints.save_state(step, state, force=True)

  def _place(self) -> dict[str, Any] | None:
    """The run's place in the data. Read when it is asked for: an iterator's state can
    be as large as its data."""
    place = self._work._position.data_state
    if place is None or self._source is None:
      return place
    return self._source.state(place["drawn"])

  def _save_is_due(self) -> bool:
    # Of every step since the last time: several updates may come between two questions.
    step = self._work.train_steps
    first = max(self._asked_until, self.saved_step() or 0) + 1
    self._asked_until = step
    return any(self._checkpoints.should_save(s) for s in range(first, step + 1))

  def saved_step(self) -> int | None:
    """The step of the newest checkpoint."""
    return self._checkpoints.latest_step()

  def restore(self) -> bool:
    """Restores the newest checkpoint; returns whether there was one.

    Raises:
      ValueError: it belongs to another run.
      RuntimeError: there are checkpoints, and none can be read.
    """
    form = self._work._state_form()
    with mesh_lib.use_mesh(mesh_lib.mesh_of(form.model_params)):
      saved = self._checkpoints.restore_state(form)
    self._work._load(saved)
    return saved is not None

  def close(self) -> None:
    """Saves what is not saved, and waits until it is written.

    Raises:
      OSError: the last checkpoint could not be written.
    """
    if (self.saved_step() or 0) < self._work.train_steps:
      self.save()
    self._checkpoints.close()
