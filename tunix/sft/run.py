"""A run: what SFT, preferences, distillation and RL share around their updates.

    unit = draw(source)                a global batch; in RL, that there are prompts
    while unit is not None:
      update(unit)
      unit = draw(source)
      evaluate, save, stop             when it is time

A `Work` says WHAT is drawn, learnt, evaluated and saved; WHEN is decided here alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Protocol

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
  """What a run is made of. A unit is what one `update` takes.

  Attributes:
    steps: optimizer updates done.
    position: where the run stands besides; the run writes into it.
    session: around a call of `train`; gives the signals that wait.
    open: (data, source of the call before, None without one) -> where units are drawn
      from, at the run's place in the data.
    begin, end: of a call of `train`.
    draw: source -> unit, None at the end of the data.
    update: (unit, skip_jit); moves `steps` and the position.
    evaluate: (data, skip_jit, signals) -> metrics by name; None: there is no data.
    main_metric: of an evaluation, and whether more of it is better.
    state: (place in the data of every process) -> everything that is saved; None:
      nothing that may be saved now.
    form: a RunState whose arrays have the shapes, dtypes and layouts of `state`'s.
    load: takes (step, state) from disk; None: there was nothing.
  """

  steps: Callable[[], int]
  position: Callable[[], Position]
  session: Callable[[], Session]
  open: Callable[[Any, Any], Source]
  begin: Callable[[], None]
  end: Callable[[], None]
  draw: Callable[[Any], Any]
  update: Callable[[Any, bool], Any]
  evaluate: Callable[[Any, bool, DeferredSignals], Mapping[str, float] | None]
  main_metric: tuple[str, bool] = ("loss", False)
  state: Callable[[Places], RunState | None]
  form: Callable[[], RunState]
  load: Callable[[tuple[int, RunState] | None], None]


class Run:
  """Drives a Work: calls of `train`, cadence, checkpoints, signals.

  Args:
    work: what is done.
    config: limits and cadence; where checkpoints go.
    tracer: notes the phases.
  """

  def __init__(self, work: Work, config: TrainingConfig, tracer: NoopTracer):
    self._work = work
    self._config = config
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
    if self._calls < work.position().calls:
      self._calls += 1
      _log.info("call %d of train was over before: nothing to do", self._calls)
      return
    if self._is_over:
      _log.info("this run has stopped early: %s", self._result())
    work.position().data_state = self._place()
    # Outside the session: skipping through data can take long, and Ctrl-C ends it.
    source = self._source = work.open(train_ds, self._source)
    with work.session() as signals:
      work.begin()
      unit = self._draw(source)
      if unit is None and not source.drawn and not self.is_finished:
        raise ValueError(
          "the training data gave no batch: it is empty, or a generator that an "
          "earlier loop has used up"
        )
      # Before the first step; or where a checkpoint was taken before the evaluation.
      self._evaluate_if_due(eval_ds, skip_jit, signals, last=unit is None)
      while unit is not None and not self._is_over:
        work.update(unit, skip_jit)
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
      work.end()

  @property
  def is_finished(self) -> bool:
    """Whether `max_steps` is reached, or patience is at its end."""
    limit = self._config.max_steps
    return self._is_over or (limit is not None and self._work.steps() >= limit)

  @property
  def _is_over(self) -> bool:
    """Read off the position, which is saved: a run that stopped early stays stopped."""
    record, options = self._record, self._config.best
    return (
      record is not None and options is not None and best_lib.is_over(record, options)
    )

  @property
  def _is_best(self) -> bool:
    """Whether the run stands at its best evaluation."""
    return self._best_step() == self._work.steps()

  def _best_step(self) -> int | None:
    return None if (record := self._record) is None else record.step

  @property
  def _record(self) -> Best | None:
    """Of the best evaluation; None where nobody asks for it."""
    if (options := self._config.best) is None:
      return None
    saved = self._work.position().best
    return best_lib.record_for(options, self._work.main_metric, saved)

  def _result(self) -> TrainResult:
    ended = "max_steps" if self.is_finished else "data"
    return TrainResult(
      steps=self._work.steps(),
      ended_by="early_stopping" if self._is_over else ended,
      best=self._record,
    )

  def _draw(self, source: Any) -> Any:
    if self.is_finished:
      return None
    with self._tracer.span_group("data"), coordination.alone("its data"):
      return self._work.draw(source)

  def _evaluate_if_due(
    self, eval_ds: Any, skip_jit: bool, signals: DeferredSignals, *, last: bool
  ) -> None:
    step, position = self._work.steps(), self._work.position()
    done, every = position.evaluated_at, self._config.eval_every_n_steps
    # Not `step % every`: a batch of rollouts makes several updates, which may step over
    # a multiple.
    crossed = every is not None and step // every > done // every
    if done < 0 or crossed or (last and done < step):
      self._judge(self._work.evaluate(eval_ds, skip_jit, signals))
      position.evaluated_at = step

  def _judge(self, metrics: Mapping[str, float] | None) -> None:
    """Notes how good an evaluation was; all processes have the same metrics."""
    options, record, step = self._config.best, self._record, self._work.steps()
    if options is None or record is None:
      return
    value = best_lib.value_of(record, metrics)
    # Before the first step it is of the model as given, and no result of the run.
    if step:
      self._work.position().best = best_lib.judge(record, options, step, value)
    if self._is_over:
      _log.info("stopped early after step %d: %s", step, self._record)

  def _end_of_call(self) -> None:
    """Everything of this call is on disk; the next one starts the data anew."""
    self._checkpoints.wait()
    self._checkpoints.prune()
    self._calls += 1
    self._source = None
    if not self.is_finished:
      position = self._work.position()
      position.calls = self._calls
      position.rewind()

  def stop_if_asked(self, signals: DeferredSignals) -> None:
    """Saves and leaves when a signal has arrived, at this process or at another.

    Raises:
      Stopped: one has.
    """
    step = self._work.steps()
    if (signum := self._notice.due(signals.pending, step)) is None:
      return
    saved = self.save() or self.saved_step() is not None
    self._checkpoints.wait()
    where = "a checkpoint is saved" if saved else "nothing is saved"
    if self._config.checkpoint_root_directory is None:
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
    step = self._work.steps()
    if self._config.checkpoint_root_directory is None or step == self.saved_step():
      return False
    what, wait = f"the checkpoint of step {step}", self._checkpoints.timeout_secs
    with self._tracer.span_group("checkpoint"):
      state = self._work.state(coordination.gather(what, self._place(), wait))
      return state is not None and self._checkpoints.save_state(step, state, force=True)

  def _place(self) -> dict[str, Any] | None:
    """The run's place in the data. Read when it is asked for: an iterator's state can
    be as large as its data."""
    place = self._work.position().data_state
    if place is None or self._source is None:
      return place
    return self._source.state(place["drawn"])

  def _save_is_due(self) -> bool:
    # Of every step since the last time: several updates may come between two questions.
    step = self._work.steps()
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
    form = self._work.form()
    with mesh_lib.use_mesh(mesh_lib.mesh_of(form.model_params)):
      saved = self._checkpoints.restore_state(form)
    self._work.load(saved)
    return saved is not None

  def close(self) -> None:
    """Saves what is not saved, and waits until it is written.

    Raises:
      OSError: the last checkpoint could not be written.
    """
    if (self.saved_step() or 0) < self._work.steps():
      self.save()
    self._checkpoints.close()
