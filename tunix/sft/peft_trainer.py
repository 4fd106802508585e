"""PeftTrainer: trains any nnx.Module, fully or by its LoRA parameters.

Here stands what users call and what subclasses override. When things happen is in
run.py, what a step computes in train_step.py, the arrays it works on in train_state.py.

    trainer = PeftTrainer(model, optax.adamw(1e-5), TrainingConfig(max_steps=100))
    trainer.train(micro_batches, eval_batches)
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Self

import jax
from flax import nnx

from tunix.models import calling
from tunix.models.transformer import moe
from tunix.perf.trace import NoopTracer
from tunix.sft import (
  hooks as hooks_lib,
  sharding_utils,
  trainer_arguments,
  windows,
)
from tunix.sft.base_trainer import BaseTrainer
from tunix.sft.batch_source import BatchSource
from tunix.sft.config import CheckpointOptions, TrainingConfig, TrainingInput
from tunix.sft.interrupts import DeferredSignals
from tunix.sft.losses import LossCall, batch_fields
from tunix.sft.metrics_logger import MetricsLogger, Mode
from tunix.sft.module_state import ModuleState
from tunix.sft.run import Places, Run, TrainResult
from tunix.sft.run_state import Progress, RunState
from tunix.sft.step_metrics import StepReporter, matmul_params
from tunix.sft.train_state import OptimizerView, TrainState
from tunix.sft.trainer_arguments import named_metrics
from tunix.sft.windows import Window

__all__ = [
  "CheckpointOptions",
  "PeftTrainer",
  "PeftTrainerConfig",
  "TrainResult",
  "TrainingConfig",
  "TrainingInput",
]

PeftTrainerConfig = TrainingConfig


class PeftTrainer(BaseTrainer):
  """Trains a module; subclasses change what a step computes.

  Subclasses may override, each called as it says:

    _read(batch)                  on the host, for a global batch that is to be cut
    _prepare_inputs(batch)        on the host, for every micro-batch
    _prepare_window(batches)      on the host, for those of a global batch together
    _train_step(model, batch)     traced: the loss of one micro-batch, a scalar mean, a
    _eval_step(model, batch)      WeightedSum, or either with aux
    _post_process_train_step(aux) aux, averaged, as metrics by name
    _post_process_eval_step(aux)
    custom_checkpoint_metadata()  JSON that is saved along

  Args:
    model: any nnx.Module. With LoRA parameters in it only those are trained. The
      object stays the caller's: after every call it holds the current weights.
    optimizer: an optax transformation; None: AdamW at `training_config.learning_rate`.
    training_config: the settings.
    metrics_logger: None: one is made from `metrics_logging_options`.
    perf_tracer: notes what is done when (tunix.perf.trace); None: as
      `training_config.perf_metrics_options` says, and by default nothing does.

  Raises:
    TypeError: arguments of the wrong kind.
    ValueError: no optimizer and no learning rate, or a checkpoint that does not fit.
    RuntimeError: there are checkpoints, and none can be read.
  """

  # With several processes: whether each of them is given all of a global batch, and not
  # its part of it.
  _batches_are_whole: ClassVar[bool] = False
  # A function of tunix.data that turns columns of text into rows of tokens. A subclass
  # sets it in its constructor; None: batches hold arrays already.
  _reader: Callable[[dict[str, Any]], Any] | None = None

  def __init__(
    self,
    model: nnx.Module,
    optimizer: Any = None,
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
      self._train_step,
      self._eval_step,
      offload_optimizer=config.offload_optimizer,
    )
    self._loss = LossCall()
    # A subclass with a step of its own says itself what its batches mean: nothing in
    # them is checked or filled up. Looked at once, here.
    steps = ("_train_step", "_eval_step")
    self._steps_are_ours = all(
      getattr(type(self), name) is getattr(PeftTrainer, name) for name in steps
    )
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
    )
    self._run = Run(self, config, self.perf_tracer)
    self.restore_checkpoint()

  # What users set.

  def with_loss_fn(self, loss_fn: Callable[..., Any], has_aux: bool = False) -> Self:
    """Replaces the loss: `loss_fn(model, **fields of the batch)`.

    It returns a scalar mean over the micro-batch (weighted by example), or a
    WeightedSum; with `has_aux` a pair of that and a dict to log, of WeightedSums, each
    a mean with weights of its own, or of scalars, weighted as the loss is.
    """
    self._loss = dataclasses.replace(self._loss, loss_fn=loss_fn, has_aux=has_aux)
    self._state.forget_steps()
    return self

  def with_gen_model_input_fn(self, fn: Callable[[Any], Any]) -> Self:
    """Replaces how a batch becomes the loss's keyword arguments; traced."""
    self._loss = dataclasses.replace(self._loss, input_fn=fn)
    self._state.forget_steps()
    return self

  def with_training_hooks(self, hooks: Any) -> Self:
    """Calls `hooks` (see hooks.TrainingHooks) around steps and evaluations."""
    self._hooks |= hooks_lib.callbacks(hooks_lib.TrainingHooks, hooks)
    return self

  def with_data_hooks(self, hooks: Any) -> Self:
    """Draws batches from `hooks` (see hooks.DataHooks)."""
    self._hooks |= hooks_lib.callbacks(hooks_lib.DataHooks, hooks)
    return self

  # What subclasses override.

  def _read(self, batch: Any) -> Any:
    """Returns the batch as arrays, which, unlike texts, can be cut into micro-batches.

    Called once for each batch, before `_prepare_inputs`.
    """
    if self._reader is None:
      return batch
    return self._reader(batch_fields(self._loss.input_fn(batch)))

  def _prepare_inputs(self, batch: Any) -> Any:
    return batch

  def _prepare_window(self, batches: list[Any]) -> list[Any]:
    """Adds what only a whole global batch can say: its micro-batches, prepared, in and
    out. An evaluation calls it batch by batch."""
    return batches

  def _train_step(self, model: nnx.Module, batch: Any) -> Any:
    return self._loss(model, batch)

  def _eval_step(self, model: nnx.Module, batch: Any) -> Any:
    return self._train_step(model, batch)

  def _post_process_train_step(self, aux: dict[str, Any]) -> dict[str, Any]:
    return aux

  def _post_process_eval_step(self, aux: dict[str, Any]) -> dict[str, Any]:
    return aux

  def custom_checkpoint_metadata(self) -> dict[str, Any]:
    """JSON that goes into every checkpoint, as `custom_metadata`."""
    return {}

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
  def metrics_logger(self) -> MetricsLogger:
    """The logger that receives every metric of the run."""
    return self._reporter.logger

  @property
  def train_steps(self) -> int:
    """Optimizer updates done."""
    return self._progress.train_steps

  @property
  def iter_steps(self) -> int:
    """Micro-batches consumed."""
    return self._progress.iter_steps

  # What a caller may do.

  def train(
    self,
    train_ds: Iterable[Any] | None,
    eval_ds: Iterable[Any] | None = None,
    skip_jit: bool = False,
  ) -> TrainResult:
    """Trains until data, `max_steps` or patience ends; goes on where a checkpoint, or a
    call that was interrupted, left the data. Called again after the data ended, it
    starts the data anew. A script that calls it several times resumes in the call that
    was under way: those before it return at once.

    Args:
      train_ds: yields micro-batches; `gradient_accumulation_steps` of them make one
        update, and what is left at the end makes a last, smaller one.
      eval_ds: can be iterated anew for every evaluation.
      skip_jit: run the steps without `jax.jit`, to debug a loss.

    Returns: steps, what ended them, and the best evaluation where it is asked for.

    Raises:
      Stopped: SIGINT or SIGTERM arrived; the step was finished and a checkpoint saved.
      ValueError: the data is empty, or nothing in a global batch is trained.
      RuntimeError: the trainer is closed and could save nothing, or an update that
        failed on the device took the weights with it.
    """
    return self._run.train(train_ds, eval_ds, skip_jit)

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
      return self._learn(self._whole(batch), skip_jit=False)

  def lower_train_step(self, batch: Any) -> jax.stages.Lowered:
    """The train step for a global batch, lowered and not run: `.compile()` it to read
    its memory plan and collectives. Arrays of the batch may be numpy, and those of the
    model `jax.ShapeDtypeStruct`s (`automodel.of_shapes`)."""
    with self._session():
      return self._state.lower(self._whole(batch).groups)

  def lower_eval_step(self, batch: Any) -> jax.stages.Lowered:
    """The step of an evaluation for a batch of its data, likewise."""
    with self._session():
      (ready,), _ = self._ready([self._read(batch)], 0)
      axes = self.training_config.data_sharding_axis
      return self._state.lower_eval(sharding_utils.shard_input(ready, axes))

  def eval_step(self, batch: Any) -> dict[str, float]:
    """Metrics of one batch: loss, perplexity, and what the loss adds.

    Raises:
      ValueError: nothing in it is trained.
    """
    with self._session() as signals:
      return self._eval_metrics([batch], False, signals)

  def close(self) -> None:
    """Saves what is not saved yet and closes files; the model stays usable.

    Raises:
      OSError: the last checkpoint could not be written.
    """
    self._module.hand_back()
    if self._closed:
      return
    self._closed = True
    try:
      self._run.close()
    finally:
      self._reporter.close()

  # The implementation of `run.Work`; `Run` decides when each method is called.

  @property
  def _position(self) -> Progress:
    return self._progress

  @contextlib.contextmanager
  def _session(self) -> Iterator[DeferredSignals]:
    """The mesh is set, signals wait, and the caller's module is handed back."""
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
    """Sends one update to the device, without waiting for it."""
    self._call_hook("on_train_step_start")
    with (
      self._reporter.step(self.train_steps),
      self.perf_tracer.span("train_step") as span,
    ):
      metrics = self._state.update(window.groups, skip_jit)
      span.device_end(metrics.loss)
    self._progress.train_steps += 1
    self._progress.iter_steps += window.drawn
    self._progress.train_rows = max(self._progress.train_rows, window.rows)
    if window.data_state is not None:  # of a batch that the user gave there is none
      self._progress.data_state = window.data_state
    aux = named_metrics(self._post_process_train_step(metrics.aux))
    self._reporter.put(self.train_steps, metrics, aux, window.tokens)
    self._call_hook("on_train_step_end", self.train_steps, metrics.loss)
    return metrics.loss

  def _evaluate(
    self, eval_ds: Any, skip_jit: bool, signals: DeferredSignals
  ) -> dict[str, float] | None:
    draw = self._hook_as_source("load_next_eval_batch")
    batches = eval_ds if draw is None else windows.until_none(draw)
    if batches is None:
      return None
    self._reporter.flush()
    self._call_hook("on_eval_step_start")
    with self.perf_tracer.span_group("evaluation"):
      metrics = self._eval_metrics(batches, skip_jit, signals)
    self._reporter.log(metrics, Mode.EVAL, self.train_steps)
    self._call_hook("on_eval_step_end", metrics["loss"])
    return metrics

  def _run_state(self, places: Places) -> RunState:
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
        f"checkpoint {step} was not written by a trainer (it has no counters): load "
        "it with CheckpointManager.restore(model), and train into another folder"
      )
    self._state.load(state)
    self._progress = Progress.from_json(state.progress)
    self._reporter.restore(state.progress["metrics"])

  def _end(self) -> None:
    self._reporter.end()
    self._call_hook("on_train_end")

  # Pieces of these.

  @property
  def _module(self) -> ModuleState:
    return self._state.module

  def _whole(self, batch: Any) -> Window:
    """A global batch, cut into micro-batches."""
    parts = windows.cut(self._read(batch), self.training_config.micro_batches)
    return self._window(parts, None)

  def _window(self, batches: list[Any], data_state: Any) -> Window:
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
    """Prepared micro-batches, and the rows they have now; see `pad_to_largest`."""
    ready = [windows.as_pytree(self._prepare_inputs(batch)) for batch in batches]
    ready = self._prepare_window(ready)
    if not self._reads_tokens:
      return ready, rows
    windows.check_read(ready, calling.call_parameters(self._module.model))
    return windows.pad_to_largest(ready, rows)

  @property
  def _reads_tokens(self) -> bool:
    """Whether batches mean what next_token_loss says they mean."""
    return self._loss.is_default and self._steps_are_ours

  def _eval_metrics(
    self, batches: Iterable[Any], skip_jit: bool, signals: DeferredSignals
  ) -> dict[str, float]:
    """Weighted means over all batches; they come home together."""
    self._module.refresh()  # once: it walks the module
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

  def _call_hook(self, name: str, *args: Any) -> Any:
    """Calls a user's hook if there is one; it may look at the model."""
    if (hook := self._hooks[name]) is None:
      return None
    self._module.hand_back()
    return hook(self, *args)

  def _hook_as_source(self, name: str) -> Callable[[], Any] | None:
    return None if self._hooks[name] is None else lambda: self._call_hook(name)
