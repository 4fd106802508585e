"""PeftTrainer: trains any nnx.Module, all of its parameters or its LoRA parameters.

This file has the public API and the extension points. loop/run.py decides when the
trainer updates, evaluates and saves; steps/train_step.py has the computation of a step;
steps/train_state.py holds the arrays.

    trainer = PeftTrainer(model, optax.adamw(1e-5), TrainingConfig(max_steps=100))
    trainer.train(micro_batches, eval_batches)
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Self

import jax
import numpy as np
from flax import nnx

from tunix.models import calling
from tunix.models.transformer.experts import moe
from tunix.perf.trace import NoopTracer
from tunix.sft import hooks as hooks_lib, sharding_utils
from tunix.sft.config import CheckpointOptions, TrainingConfig, TrainingInput
from tunix.sft.loop import trainer_arguments
from tunix.sft.loop.base_trainer import BaseTrainer
from tunix.sft.loop.interrupts import DeferredSignals
from tunix.sft.loop.run import Places, Run, TrainResult
from tunix.sft.loop.trainer_arguments import Optimizer, named_metrics
from tunix.sft.losses import LossCall, batch_fields
from tunix.sft.metrics_logger import MetricsLogger, Mode
from tunix.sft.steps import windows
from tunix.sft.steps.batch_source import BatchSource
from tunix.sft.steps.module_state import ModuleState
from tunix.sft.steps.run_state import Progress, RunState
from tunix.sft.steps.step_metrics import StepReporter, matmul_params
from tunix.sft.steps.train_state import OptimizerView, TrainState
from tunix.sft.steps.train_step import BatchLoss
from tunix.sft.steps.windows import Window

__all__ = [
  "CheckpointOptions",
  "PeftTrainer",
  "PeftTrainerConfig",
  "TrainResult",
  "TrainingConfig",
  "TrainingInput",
]

PeftTrainerConfig = TrainingConfig

_log = logging.getLogger(__name__)


class PeftTrainer(BaseTrainer):
  """Trains a module with any loss.

  Subclasses may override these methods:

    _read(batch)                  host: converts each batch, a global one before it is
                                  cut into micro-batches
    _prepare_inputs(batch)        host: prepares each micro-batch
    _prepare_window(batches)      host: prepares the micro-batches of a global batch
                                  together; an evaluation passes one batch at a time
    _train_step(model, batch)     traced: returns the loss of a micro-batch (a scalar
    _eval_step(model, batch)      mean or a WeightedSum), or a pair of it and aux
    _post_process_train_step(aux) converts the means of aux into metrics by name
    _post_process_eval_step(aux)
    custom_checkpoint_metadata()  returns JSON values for each checkpoint

  Args:
    model: any nnx.Module. If it has LoRA parameters, only these are trained. The
      caller's object holds the current weights after every call of a method.
    optimizer: an optax transformation; None: AdamW at `training_config.learning_rate`.
    training_config: the settings; None: the defaults.
    metrics_logger: receives the metrics; None: a logger is made from
      `training_config.metrics_logging_options`.
    perf_tracer: records the time of each phase (tunix.perf.trace); None: a tracer is
      made from `training_config.perf_metrics_options`, which by default records
      nothing.

  Raises:
    TypeError: An argument has the wrong type.
    ValueError: There is neither an optimizer nor a learning rate, or the checkpoint in
      the folder does not fit.
    RuntimeError: There are checkpoints, and none can be read.
  """

  # True if, with several processes, each process passes the whole global batch instead
  # of its shard.
  _batches_are_whole: ClassVar[bool] = False
  # A function of tunix.data that turns columns of text into rows of tokens. A subclass
  # sets it in its constructor; None: batches hold arrays already.
  _reader: Callable[[dict[str, Any]], Any] | None = None

  def __init__(
    self,
    model: nnx.Module,
    optimizer: Optimizer | None = None,
    training_config: TrainingConfig | None = None,
    metrics_logger: MetricsLogger | None = None,
    perf_tracer: NoopTracer | None = None,
  ):
    config = TrainingConfig() if training_config is None else training_config
    trainer_arguments.check_kinds(model, config)
    self.training_config = config
    self.perf_tracer = trainer_arguments.resolve_tracer(perf_tracer, config)
    tx = trainer_arguments.resolve_optimizer(optimizer, config)
    self._state = TrainState(
      model,
      tx,
      self._traced_losses,
      offload_optimizer=config.offload_optimizer,
    )
    self._loss = LossCall()
    # The batches of a subclass with another step may have any meaning, so they are
    # neither checked nor padded.
    kind = type(self)
    self._has_default_steps = (
      kind._train_step is PeftTrainer._train_step
      and kind._eval_step is PeftTrainer._eval_step
    )
    self._more_evaluation: Callable[[nnx.Module], Mapping[str, float]] | None = None
    self._hooks = {
      **hooks_lib.callbacks(hooks_lib.TrainingHooks, None),
      **hooks_lib.callbacks(hooks_lib.DataHooks, None),
    }
    self._progress = Progress()
    self._closed = False
    self._reporter = StepReporter(
      metrics_logger or MetricsLogger(config.metrics_logging_options),
      config,
      matmul_params(self._module.params, self._module.frozen, moe.active_share(model)),
      self._state.devices,
      self.perf_tracer,
      self.check_weights,
    )
    self._run = Run(self, config, self.perf_tracer)
    self.restore_checkpoint()

  # Settings.

  def with_loss_fn(self, loss_fn: Callable[..., Any], has_aux: bool = False) -> Self:
    """Replaces the loss by `loss_fn(model, **fields of the batch)`.

    Args:
      loss_fn: returns a scalar mean over the examples of the micro-batch, or a
        WeightedSum.
      has_aux: True if `loss_fn` returns a pair of the loss and a dict of metrics. Each
        metric is a WeightedSum, or a scalar with the weight of the loss.
    """
    self._loss = dataclasses.replace(self._loss, loss_fn=loss_fn, has_aux=has_aux)
    self._state.forget_steps()
    return self

  def with_gen_model_input_fn(self, fn: Callable[[Any], Any]) -> Self:
    """Replaces the function from a batch to the loss's keyword arguments.

    The function is traced, except in trainers that read text, where it runs on the
    host.
    """
    self._loss = dataclasses.replace(self._loss, input_fn=fn)
    self._state.forget_steps()
    return self

  def with_training_hooks(self, hooks: object) -> Self:
    """Calls the methods of `hooks` around steps; see hooks.TrainingHooks."""
    self._hooks |= hooks_lib.callbacks(hooks_lib.TrainingHooks, hooks)
    return self

  def with_data_hooks(self, hooks: object) -> Self:
    """Draws batches from the methods of `hooks`; see hooks.DataHooks."""
    self._hooks |= hooks_lib.callbacks(hooks_lib.DataHooks, hooks)
    return self

  def with_evaluation(
    self, evaluate: Callable[[nnx.Module], Mapping[str, float]] | None
  ) -> Self:
    """Adds metrics to each evaluation; evaluations then need no evaluation data.

    Args:
      evaluate: function of the model with its current weights that returns metrics by
        name, such as an `EnvEvaluation`. All processes must return the same values.
        None: no further metrics.
    """
    self._more_evaluation = evaluate
    return self

  # Extension points of subclasses.

  def _read(self, batch: object) -> Any:
    """Returns the batch as arrays, which, unlike texts, can be cut into micro-batches.

    Called once for each batch, before `_prepare_inputs`.
    """
    if self._reader is None:
      return batch
    return self._reader(batch_fields(self._loss.input_fn(batch)))

  def _prepare_inputs(self, batch: Any) -> Any:
    return batch

  def _prepare_window(self, batches: list[Any]) -> list[Any]:
    """Returns prepared micro-batches with values that need the whole global batch.

    An evaluation calls it for each batch alone.
    """
    return batches

  def _train_step(self, model: nnx.Module, batch: Any) -> Any:
    return self._loss(model, batch)

  def _eval_step(self, model: nnx.Module, batch: Any) -> Any:
    return self._train_step(model, batch)

  def _traced_losses(self) -> tuple[BatchLoss, BatchLoss]:
    """Returns `_train_step` and `_eval_step`, or values that compute the same.

    Values that can be compared let trainers share compiled steps, see
    steps/shared_steps.py.
    """
    if self._has_default_steps:
      return self._loss, self._loss
    return self._train_step, self._eval_step

  def _losses_of(self, owner: type, loss: BatchLoss) -> tuple[BatchLoss, BatchLoss]:
    """Returns `loss` for both steps, unless a subclass of `owner` replaces a step."""
    steps = lambda kind: (kind._train_step, kind._eval_step)
    if steps(type(self)) == steps(owner):
      return loss, loss
    return self._train_step, self._eval_step

  def _post_process_train_step(self, aux: dict[str, Any]) -> dict[str, Any]:
    return aux

  def _post_process_eval_step(self, aux: dict[str, Any]) -> dict[str, Any]:
    return aux

  def custom_checkpoint_metadata(self) -> dict[str, Any]:
    """Returns JSON values for the `custom_metadata` of every checkpoint."""
    return {}

  # State that a caller can read.

  @property
  def model(self) -> nnx.Module:
    """The caller's module with the current weights."""
    return self._module.hand_back()

  @property
  def optimizer(self) -> OptimizerView:
    """The optax transformation, its current state and the number of updates."""
    return OptimizerView(self._state.tx, self._state.opt_state, self.train_steps)

  @property
  def metrics_logger(self) -> MetricsLogger:
    """The logger that receives every metric of the run."""
    return self._reporter.logger

  @property
  def train_steps(self) -> int:
    """The number of optimizer updates."""
    return self._progress.train_steps

  @property
  def iter_steps(self) -> int:
    """The number of consumed micro-batches."""
    return self._progress.iter_steps

  @property
  def is_finite(self) -> bool:
    """True if all trained weights are finite; waits for the device."""
    return self._state.is_finite()

  # Actions.

  def train(
    self,
    train_ds: Iterable[Any] | None,
    eval_ds: Iterable[Any] | None = None,
    skip_jit: bool = False,
  ) -> TrainResult:
    """Trains until the data, `max_steps` or patience ends.

    A resumed run continues at its place in the data. If the data has ended, calling
    `train` again restarts the data; the step count continues toward `max_steps`. A
    script with several calls resumes in the interrupted call: completed calls return at
    once.

    Args:
      train_ds: an iterable of micro-batches. `gradient_accumulation_steps` of them make
        one update; the rest at the end of the data makes a last, smaller update.
      eval_ds: an iterable that can be iterated again for each evaluation.
      skip_jit: run the steps without `jax.jit`, to debug a loss.

    Returns: the number of steps, the reason for the end, and the best evaluation if
      `training_config.best` is set.

    Raises:
      Stopped: SIGINT or SIGTERM arrived. The step was finished and saved.
      ValueError: The data is empty, or a global batch has no trained token.
      RuntimeError: A trained weight is not finite; the trainer is closed and cannot
        save; or an update failed on the device and deleted the weights.
    """
    return self._run.train(train_ds, eval_ds, skip_jit)

  def train_step(self, batch: object, *unexpected: object) -> jax.Array:
    """Makes one update by a global batch.

    Args:
      batch: the global batch, which is cut into `gradient_accumulation_steps`
        micro-batches.

    Returns: the loss before the update, a device scalar.

    Raises:
      TypeError: There is more than one argument, or the batch has no arrays.
      ValueError: The batch cannot be cut, or has no trained token.
    """
    if unexpected or isinstance(batch, nnx.Module):
      raise TypeError(
        "train_step takes one argument, a batch. Call trainer.train_step(batch)."
      )
    with self._session():
      return self._learn(self._whole(batch), skip_jit=False)

  def lower_train_step(self, batch: object) -> jax.stages.Lowered:
    """Lowers the train step for a global batch, without running it.

    `.compile()` of the result gives the memory plan and the collectives. The arrays of
    the batch may be NumPy arrays, and those of the model `jax.ShapeDtypeStruct`s
    (`automodel.of_shapes`).
    """
    with self._session():
      return self._state.lower(self._whole(batch).groups)

  def lower_eval_step(self, batch: object) -> jax.stages.Lowered:
    """Lowers the evaluation step for a batch, without running it."""
    with self._session():
      (ready,), _ = self._ready([self._read(batch)], 0)
      axes = self.training_config.data_sharding_axis
      return self._state.lower_eval(sharding_utils.shard_input(ready, axes))

  def eval_step(self, batch: object) -> dict[str, float]:
    """Returns the metrics of one batch: loss, perplexity, and those of the loss's aux.

    Raises:
      ValueError: The batch has no trained token.
    """
    with self._session() as signals:
      return self._eval_metrics([batch], False, signals)

  def close(self) -> None:
    """Saves the last step if it is not saved, and closes files; the model stays usable.

    Raises:
      OSError: The last checkpoint could not be written.
    """
    self._module.hand_back()
    if self._closed:
      return
    self._closed = True
    try:
      self._run.close()
    finally:
      self._reporter.close()

  def check_weights(self) -> None:
    """Ends a run whose weights are of no use.

    Raises:
      RuntimeError: A trained weight is not finite.
    """
    if not (self._closed or self.is_finite):
      raise RuntimeError(
        f"a weight is not finite after step {self.train_steps}, and nothing is saved "
        "from here on. Lower the learning rate, clip the gradient (in a command with "
        "training.max_grad_norm, in Python with optax.clip_by_global_norm), or look at "
        "the batches and the loss of the last steps"
      )

  # The implementation of `run.Work`; `Run` decides when each method is called.

  @property
  def _position(self) -> Progress:
    return self._progress

  @property
  def _had_no_gradient(self) -> bool:
    return self._reporter.had_no_gradient

  @contextlib.contextmanager
  def _session(self) -> Iterator[DeferredSignals]:
    """Sets the mesh, defers signals, and hands the caller's module back at the end."""
    with DeferredSignals() as signals, self._state.at_work():
      try:
        yield signals
      except BaseException:
        self._reporter.stop()
        raise

  def _open(self, train_ds: Any, previous: BatchSource | None) -> BatchSource:
    place = self._progress.data_state
    if previous is not None and previous.continues(train_ds):
      previous.go_back(0 if place is None else place["drawn"])
      return previous
    return BatchSource(train_ds, self._hook_as_source("load_next_train_batch"), place)

  def _begin(self) -> None:
    self._call_hook("on_train_start")

  def _draw(self, source: BatchSource) -> Window | None:
    batches = source.take(self.training_config.micro_batches)
    if not batches:
      return None
    with self.perf_tracer.span_group("prepare"):
      read = [self._read(batch) for batch in batches]
      return self._window(read, {"drawn": source.drawn})

  def _learn(self, window: Window, skip_jit: bool) -> jax.Array:
    """Dispatches one update to the device, without waiting for it."""
    self._call_hook("on_train_step_start")
    shapes = tuple(np.shape(x) for x in jax.tree.leaves(window.groups))
    with (
      self._reporter.step(self.train_steps, shapes),
      self.perf_tracer.span("train_step") as span,
    ):
      metrics = self._state.update(window.groups, skip_jit)
      span.device_end(metrics.loss)
    self._progress.train_steps += 1
    self._progress.iter_steps += window.drawn
    self._progress.train_rows = max(self._progress.train_rows, window.rows)
    if window.data_state is not None:  # it is None for a batch of the caller
      self._progress.data_state = window.data_state
    aux = named_metrics(self._post_process_train_step(metrics.aux))
    aux |= metrics.router or {}
    self._reporter.put(self.train_steps, metrics, aux, window.tokens)
    self._call_hook("on_train_step_end", self.train_steps, metrics.loss)
    return metrics.loss

  def _evaluate(
    self, eval_ds: Any, skip_jit: bool, signals: DeferredSignals
  ) -> dict[str, float] | None:
    draw = self._hook_as_source("load_next_eval_batch")
    batches = eval_ds if draw is None else windows.until_none(draw)
    if batches is None and self._more_evaluation is None:
      return None
    self._reporter.flush()
    metrics: dict[str, float] = {}
    if batches is not None:
      self._call_hook("on_eval_step_start")
    with self.perf_tracer.span_group("evaluation"):
      if batches is not None:
        batches = self._reporter.counted(batches, self.train_steps)
        metrics |= self._eval_metrics(batches, skip_jit, signals)
      if self._more_evaluation is not None:
        metrics |= self._more_evaluation(self.model)
    self._reporter.log(metrics, Mode.EVAL, self.train_steps)
    if batches is not None:
      self._call_hook("on_eval_step_end", metrics["loss"])
    return metrics

  def _run_state(self, places: Places) -> RunState | None:
    if not self.is_finite:
      _log.warning("step %d is not saved: a weight is not finite", self.train_steps)
      return None
    return self._state.to_run_state(
      progress={**self._progress.to_json(places), "metrics": self._reporter.state()},
      custom_metadata=self.custom_checkpoint_metadata(),
    )

  def _state_form(self) -> RunState:
    return self._state.to_run_state()

  def _load(self, saved: tuple[int, RunState] | None) -> None:
    if saved is None:
      self._reporter.restore(None)
      return
    step, state = saved
    if state.progress is None:
      raise ValueError(
        f"checkpoint {step} was not written by a trainer (it has no counters). Load it "
        "with CheckpointManager.restore(model), and train into another folder."
      )
    self._state.load(state)
    self._progress = Progress.from_json(state.progress)
    self._reporter.restore(state.progress["metrics"])

  def _end(self) -> None:
    self._reporter.end()
    self.check_weights()
    self._call_hook("on_train_end")

  # Helper methods.

  @property
  def _module(self) -> ModuleState:
    return self._state.module

  def _whole(self, batch: object) -> Window:
    """Returns a global batch of the caller as a window."""
    parts = windows.cut(self._read(batch), self.training_config.micro_batches)
    return self._window(parts, None)

  def _window(self, batches: list[Any], data_state: object) -> Window:
    ready, rows = self._ready(batches, self._progress.train_rows)
    if self._reads_tokens:
      windows.check_trained(ready)
    return windows.make(
      ready,
      self.training_config,
      len(batches),
      data_state,
      rows=rows,
      whole=self._batches_are_whole,
    )

  def _ready(self, batches: Iterable[Any], rows: int) -> tuple[list[Any], int]:
    """Prepares micro-batches; returns them with their rows, see `pad_to_largest`."""
    ready = [windows.as_pytree(self._prepare_inputs(batch)) for batch in batches]
    ready = self._prepare_window(ready)
    if not self._reads_tokens:
      return ready, rows
    windows.check_read(ready, calling.call_parameters(self._module.model))
    return windows.pad_to_largest(ready, rows)

  @property
  def _reads_tokens(self) -> bool:
    """True if batches have the fields and the meaning of a TrainingInput."""
    return self._loss.is_default and self._has_default_steps

  def _eval_metrics(
    self, batches: Iterable[Any], skip_jit: bool, signals: DeferredSignals
  ) -> dict[str, float]:
    """Returns weighted means over all batches, in one transfer from the device."""
    self._module.refresh()  # once for all batches, because it walks the module
    axes = self.training_config.data_sharding_axis
    parts, tokens, rows = [], 0, 0
    for batch in batches:
      ready, rows = self._ready([self._read(batch)], rows)
      tokens += windows.token_count(ready, axes)
      placed = sharding_utils.shard_input(ready[0], axes)
      with self.perf_tracer.span("eval_step") as span:
        parts.append(self._state.evaluate(placed, skip_jit))
        span.device_end(parts[-1][0].total)
      self._reporter.bound(parts[-1][0])
      self._run.stop_if_signalled(signals)
    return self._reporter.eval_means(
      parts, lambda aux: named_metrics(self._post_process_eval_step(aux)), tokens
    )

  def _call_hook(self, name: str, *args: object) -> Any:
    """Calls a hook of the user, if there is one; the hook can read the model."""
    if (hook := self._hooks[name]) is None:
      return None
    self._module.hand_back()
    return hook(self, *args)

  def _hook_as_source(self, name: str) -> Callable[[], Any] | None:
    return None if self._hooks[name] is None else lambda: self._call_hook(name)
