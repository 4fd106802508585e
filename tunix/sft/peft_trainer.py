"""PeftTrainer: trains any nnx.Module, fully or by its LoRA parameters.

The trainer keeps cadence and side effects: when to evaluate, log and save. What a step
computes is in train_step.py; the arrays it works on are in module_state.py.

    trainer = PeftTrainer(model, optax.adamw(1e-5), TrainingConfig(max_steps=100))
    trainer.train(micro_batches, eval_batches)
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx

from tunix.models import calling
from tunix.sft import (
  hooks as hooks_lib,
  sharding_utils,
  trainer_arguments,
  windows,
)
from tunix.sft.batch_source import BatchSource, eval_batches
from tunix.sft.checkpoint_manager import CheckpointManager
from tunix.sft.config import CheckpointOptions, TrainingConfig, TrainingInput
from tunix.sft.extension_points import ExtensionPoints
from tunix.sft.metrics_logger import MetricsLogger, Mode
from tunix.sft.module_state import ModuleState
from tunix.sft.run_state import Progress
from tunix.sft.step_metrics import StepReporter, matmul_params
from tunix.sft.train_state import TrainState
from tunix.sft.trainer_arguments import named_metrics
from tunix.sft.windows import Window
from tunix.utils import mesh as mesh_lib
from tunix.utils.interrupts import DeferredSignals, Stopped

__all__ = [
  "CheckpointOptions",
  "PeftTrainer",
  "PeftTrainerConfig",
  "TrainingConfig",
  "TrainingInput",
]

PeftTrainerConfig = TrainingConfig

_log = logging.getLogger(__name__)


class OptimizerView(NamedTuple):
  """The optimizer as it stands: the transformation, its state, updates done."""

  tx: optax.GradientTransformation
  opt_state: Any
  step: int


class PeftTrainer(ExtensionPoints):
  """Trains a module; subclasses change what a step computes.

  What subclasses may override, and what `with_...` sets, is in ExtensionPoints.

  Args:
    model: any nnx.Module. With LoRA parameters in it only those are trained. The
      object stays the caller's: after every call it holds the current weights.
    optimizer: an optax transformation; None: AdamW at `training_config.learning_rate`.
    training_config: the settings.
    metrics_logger: None: one is made from `metrics_logging_options`.
    perf_tracer: not offered yet; anything but None is refused.

  Raises:
    TypeError: arguments of the wrong kind.
    ValueError: no optimizer and no learning rate, or a checkpoint that does not fit.
    RuntimeError: there are checkpoints, and none can be read.
  """

  def __init__(
    self,
    model: nnx.Module,
    optimizer: Any = None,
    training_config: TrainingConfig | None = None,
    metrics_logger: MetricsLogger | None = None,
    perf_tracer: None = None,
  ):
    super().__init__()
    config = TrainingConfig() if training_config is None else training_config
    trainer_arguments.check_kinds(model, config)
    if perf_tracer is not None:
      raise ValueError("perf_tracer is not offered yet: leave it out")
    self.training_config = config
    tx = trainer_arguments.resolve_optimizer(optimizer, config)
    self._state = TrainState(model, tx)
    self._progress = Progress()
    self._source: BatchSource | None = None  # of a call that was interrupted
    self._calls = 0  # calls of `train` that this process has behind it
    self._closed = False
    self._reporter = StepReporter(
      metrics_logger or MetricsLogger(config.metrics_logging_options),
      config,
      matmul_params(self._module.params, self._module.frozen),
      self._state.devices,
    )
    self._checkpoints = CheckpointManager(
      config.checkpoint_root_directory, config.checkpointing_options
    )
    self.restore_checkpoint()

  # What a caller may look at.

  @property
  def model(self) -> nnx.Module:
    """The caller's module, with the current weights."""
    return self._module.hand_back()

  @property
  def optimizer(self) -> OptimizerView:
    """The transformation, its current state and the number of updates."""
    return OptimizerView(self._state.tx, self._state.opt_state, self.train_steps)

  @property
  def _module(self) -> ModuleState:
    return self._state.module

  @property
  def train_steps(self) -> int:
    """Optimizer updates done."""
    return self._progress.train_steps

  @property
  def iter_steps(self) -> int:
    """Micro-batches consumed."""
    return self._progress.iter_steps

  # The loop.

  def train(
    self,
    train_ds: Iterable[Any] | None,
    eval_ds: Iterable[Any] | None = None,
    skip_jit: bool = False,
  ) -> None:
    """Trains until the data or `max_steps` ends; goes on where a checkpoint, or a
    call that was interrupted, left the data. Called again after the data ended, it
    starts the data anew. A script that calls it several times resumes in the call that
    was under way: those before it return at once.

    Args:
      train_ds: yields micro-batches; `gradient_accumulation_steps` of them make one
        update, and what is left at the end makes a last, smaller one.
      eval_ds: can be iterated anew for every evaluation.
      skip_jit: run the steps without `jax.jit`, to debug a loss.

    Raises:
      Stopped: SIGINT or SIGTERM arrived; the step was finished and a checkpoint saved.
      ValueError: the data is empty, or nothing in a global batch is trained.
    """
    if self._calls < self._progress.calls:
      self._calls += 1
      _log.info("call %d of train was over before: nothing to do", self._calls)
      return
    self._source = source = self._open(train_ds)
    with self._session() as signals:
      self._call_hook("on_train_start")
      window = self._draw(source)
      if window is None and not self._finished and not source.drawn:
        raise ValueError(
          "the training data gave no batch: it is empty, or a generator that an "
          "earlier loop has used up"
        )
      # Before the first step; or where a checkpoint was taken before the evaluation.
      if self._evaluation_is_due(last=window is None):
        self._evaluate(eval_ds, skip_jit, signals)
      while window is not None:
        self._dispatch(window, skip_jit)
        self._stop_if_asked(signals)
        window = self._draw_or_save(source)
        self._after_step(eval_ds, signals, last=window is None, skip_jit=skip_jit)
      self._end_of_call()
      self._call_hook("on_train_end")

  def train_step(self, batch: Any, *unexpected: Any) -> jax.Array:
    """One update by one global batch, cut into `gradient_accumulation_steps` parts.

    Returns: the loss before the update, a device scalar.

    Raises:
      TypeError: more than a batch was given, or it holds no arrays.
      ValueError: its rows do not divide, or nothing in it is trained.
    """
    if unexpected or isinstance(batch, nnx.Module):
      raise TypeError("train_step takes a batch alone: trainer.train_step(batch)")
    with self._session():
      loss = self._dispatch(self._whole(batch), skip_jit=False)
    return loss

  def lower_train_step(self, batch: Any) -> jax.stages.Lowered:
    """The train step for a global batch, lowered and not run: `.compile()` it to read
    its memory plan and collectives. Arrays of the batch may be numpy."""
    with self._session():
      window = self._whole(batch)
      self._module.refresh()
      return self._steps.train(self._state, skip_jit=False).lower(  # pyright: ignore
        self._module.params,
        self._state.opt_state,
        self._module.rest,
        self._module.frozen,
        window.groups,
      )

  def eval_step(self, batch: Any) -> dict[str, float]:
    """Metrics of one batch: loss, perplexity, and what the loss adds.

    Raises:
      ValueError: nothing in it is trained.
    """
    with self._session() as signals:
      return self._eval_metrics([batch], False, signals)

  def save_checkpoint(self) -> bool:
    """Saves the run now; returns False without a checkpoint folder, or when this step
    is saved already.

    Raises:
      OSError: the disk is full or not writable; asynchronous saving may raise it later.
      RuntimeError: the trainer is closed.
    """
    return self._save(force=True)

  def restore_checkpoint(self) -> bool:
    """Restores the newest checkpoint; returns whether there was one.

    Raises:
      ValueError: it belongs to another model or optimizer, or to no run.
      RuntimeError: there are checkpoints, and none can be read.
    """
    with mesh_lib.use_mesh(self._state.mesh):
      found = self._checkpoints.restore_state(self._state.to_run_state())
    if found is None:
      self._reporter.restore(None)
      return False
    step, state = found
    if (progress := state.progress) is None:
      raise ValueError(
        f"checkpoint {step} was not written by a trainer (it has no counters): load "
        "it with CheckpointManager.restore(model), and train into another folder"
      )
    self._state.load(state)
    self._progress = Progress.from_json(progress)
    self._reporter.restore(progress["metrics"])
    return True

  def close(self) -> None:
    """Saves what is not saved yet and closes files; the model stays usable.

    Raises:
      OSError: the last checkpoint could not be written.
    """
    self._module.hand_back()
    if self._closed:
      return
    self._closed = True
    if self.train_steps and (self._checkpoints.latest_step() or 0) < self.train_steps:
      self._save(force=True)
    self._checkpoints.close()
    self._reporter.close()

  # Pieces of the loop.

  @contextlib.contextmanager
  def _session(self) -> Iterator[DeferredSignals]:
    """The mesh is set, signals wait, and the caller's module is handed back."""
    if self._state.place():
      self._steps.clear()
    with mesh_lib.use_mesh(self._state.mesh), DeferredSignals() as signals:
      try:
        yield signals
      except BaseException:
        self._reporter.stop()
        raise
      finally:
        self._module.hand_back()

  def _open(self, train_ds: Any) -> BatchSource:
    """The data, at the place where it is to go on."""
    place, source = self._progress.data_state, self._source
    if source is not None and source.continues(train_ds):
      source.go_back(0 if place is None else place["drawn"])
      return source
    return BatchSource(train_ds, self._hooks["data"], self, place)

  def _draw(self, source: BatchSource) -> Window | None:
    """The next global batch; None when the data or the run ends."""
    if self._finished:
      return None
    if source.from_hooks:
      self._module.hand_back()
    batches = source.take(self.training_config.micro_batches)
    return self._window(batches, source.state()) if batches else None

  def _draw_or_save(self, source: BatchSource) -> Window | None:
    """`_draw`; when that fails, the steps that were done are saved first."""
    try:
      return self._draw(source)
    except BaseException:  # whatever it was, it goes on its way after the save
      self._save(force=True)
      raise

  @property
  def _finished(self) -> bool:
    """Whether `max_steps` is reached."""
    limit = self.training_config.max_steps
    return limit is not None and self.train_steps >= limit

  def _whole(self, batch: Any) -> Window:
    """A global batch, cut into micro-batches."""
    return self._window(windows.cut(batch, self.training_config.micro_batches), None)

  def _window(self, batches: list[Any], data_state: Any) -> Window:
    ready = self._ready(batches)
    if self._is_default("_train_step"):
      progress, accepted = self._progress, calling.call_parameters(self._module.model)
      ready, progress.train_rows = windows.pad_to_largest(ready, progress.train_rows)
      windows.check(ready, accepted)
    return windows.make(ready, self.training_config, len(batches), data_state)

  def _ready(self, batches: Iterable[Any]) -> list[Any]:
    ready = [windows.as_pytree(self._prepare_inputs(batch)) for batch in batches]
    return self._prepare_window(ready)

  def _dispatch(self, window: Window, skip_jit: bool) -> jax.Array:
    """Sends one update to the device, without waiting for it."""
    self._call_hook("on_train_step_start")
    self._module.own()
    step = self._steps.train(self._state, skip_jit)
    with self._reporter.step(self.train_steps):
      params, self._state.opt_state, rest, metrics = step(
        self._module.params,
        self._state.opt_state,
        self._module.rest,
        self._module.frozen,
        window.groups,
      )
    self._module.replace(params, rest)
    self._progress.train_steps += 1
    self._progress.iter_steps += window.drawn
    self._progress.data_state = window.data_state
    aux = named_metrics(self._post_process_train_step(metrics.aux))
    self._reporter.put(self.train_steps, metrics, aux, window.tokens)
    self._call_hook("on_train_step_end", self.train_steps, metrics.loss)
    return metrics.loss

  def _after_step(
    self, eval_ds: Any, signals: DeferredSignals, *, last: bool, skip_jit: bool
  ) -> None:
    """Evaluates and saves when it is time."""
    if self._evaluation_is_due(last=last):
      self._evaluate(eval_ds, skip_jit, signals)
    self._save(force=last)
    self._stop_if_asked(signals)

  def _evaluation_is_due(self, *, last: bool) -> bool:
    step, done = self.train_steps, self._progress.evaluated_at
    every = self.training_config.eval_every_n_steps
    on_time = last or step == 0 or (every is not None and step % every == 0)
    return done < 0 or (on_time and done < step)

  def _evaluate(self, eval_ds: Any, skip_jit: bool, signals: DeferredSignals) -> None:
    batches = eval_ds
    if hooks_lib.provides(self._hooks["data"], "load_next_eval_batch"):
      self._module.hand_back()
      batches = eval_batches(self._hooks["data"], self)
    if batches is not None:
      self._reporter.flush()
      self._call_hook("on_eval_step_start")
      metrics = self._eval_metrics(batches, skip_jit, signals)
      self._reporter.log(metrics, Mode.EVAL, self.train_steps)
      self._call_hook("on_eval_step_end", metrics["loss"])
    self._progress.evaluated_at = self.train_steps

  def _eval_metrics(
    self, batches: Iterable[Any], skip_jit: bool, signals: DeferredSignals
  ) -> dict[str, float]:
    """Weighted means over all batches; they come home together."""
    self._module.refresh()
    step, module = self._steps.eval(self._state, skip_jit), self._module
    parts, tokens, rows = [], 0, 0
    for batch in batches:
      ready = self._ready([batch])
      if self._is_default("_train_step", "_eval_step"):
        ready, rows = windows.pad_to_largest(ready, rows)
      tokens += windows.token_count(ready)
      placed = sharding_utils.shard_input(
        ready[0], self.training_config.data_sharding_axis
      )
      parts.append(step(module.params, module.rest, module.frozen, placed))
      self._reporter.bound(parts[-1][0])
      self._stop_if_asked(signals)
    return self._reporter.eval_means(
      parts, lambda aux: named_metrics(self._post_process_eval_step(aux)), tokens
    )

  def _save(self, *, force: bool) -> bool:
    step = self.train_steps
    if step == self._checkpoints.latest_step():
      return False
    if not force and not self._checkpoints.should_save(step):
      return False
    state = self._state.to_run_state(
      progress={**self._progress.to_json(), "metrics": self._reporter.state()},
      custom_metadata=self.custom_checkpoint_metadata(),
    )
    return self._checkpoints.save_state(step, state, force=True)

  def _end_of_call(self) -> None:
    """Everything of this call of `train` is on disk; the next starts the data anew."""
    self._reporter.end()
    self._checkpoints.wait()
    self._calls += 1
    if not self._finished:
      self._progress.data_state, self._progress.calls = None, self._calls
    self._source = None

  def _stop_if_asked(self, signals: DeferredSignals) -> None:
    """Saves and leaves when a signal has arrived."""
    if signals.pending is None:
      return
    self._reporter.flush()
    saved = self._save(force=True) or self._checkpoints.latest_step() is not None
    self._checkpoints.wait()
    where = "a checkpoint is saved" if saved else "no checkpoint folder was given"
    raise Stopped(signals.pending, f"stopped after step {self.train_steps}; {where}")
