"""DistillationTrainer: a student learns from a teacher, by a strategy.

trainer = DistillationTrainer(
  student, teacher, LogitStrategy(temperature=2.0, alpha=0.5),
  optax.adamw(1e-4), TrainingConfig(max_steps=100),
)
trainer.train(batches)
trainer.close()
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx

from tunix.distillation import vocabulary
from tunix.distillation.outputs import Inputs
from tunix.distillation.strategies import base_strategy
from tunix.distillation.strategies.base_strategy import BaseStrategy
from tunix.distillation.teacher_cache import TeacherCache
from tunix.distillation.teacher_table import to_device
from tunix.models.backbone import share_variables
from tunix.perf.trace import NoopTracer
from tunix.sft import inference, windows
from tunix.sft.config import (
  TrainingConfig as _TrainingConfig,
  TrainingInput as _TrainingInput,
)
from tunix.sft.metrics_logger import MetricsLogger
from tunix.sft.module_state import trained_variables
from tunix.sft.peft_trainer import PeftTrainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig(_TrainingConfig):
  """Settings of a distillation: those of every training."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainingInput(_TrainingInput):
  """One micro-batch, with what the teacher says of it if that is known already.

  Attributes:
    teacher_output: as `BaseStrategy.get_teacher_outputs` gives it; None: the teacher is
      asked.
  """

  teacher_output: Any = None


class Taught(NamedTuple):
  """A user's batch, untouched, and what the teacher says of it."""

  batch: Any
  teacher_output: Any


class DistillationTrainer(PeftTrainer):
  """Trains a student on what a teacher says of the same tokens.

  The teacher runs in eval mode, without gradient, outside the student's step: on the
  mesh or the device, and in the dtype, that it has. Subclasses may override
  `get_train_loss` and `get_eval_loss`; a new way to compare the two is a strategy.

  Args:
    student_model: any module; with LoRA parameters only those are trained. Until
      `close` it may hold what the strategy put into it.
    teacher_model: any module; a TeacherCache; or None, when the batches bring
      `teacher_output`.
    strategy: what is compared.
    optimizer, training_config, metrics_logger, perf_tracer: see PeftTrainer.
    tokenizers: of the student and of the teacher; refused if they differ.

  Raises:
    TypeError: the strategy's methods take other arguments than strategies' do.
    ValueError: vocabularies or tokenizers that differ, or see PeftTrainer.
  """

  def __init__(
    self,
    student_model: nnx.Module,
    teacher_model: nnx.Module | TeacherCache | None,
    strategy: BaseStrategy,
    optimizer: Any = None,
    training_config: _TrainingConfig | None = None,
    metrics_logger: MetricsLogger | None = None,
    *,
    tokenizers: tuple[Any, Any] | None = None,
    perf_tracer: NoopTracer | None = None,
  ):
    base_strategy.check(strategy)
    _check_models(student_model, teacher_model)
    if tokenizers is not None:
      vocabulary.check_tokenizers(*tokenizers)
    student, teacher = strategy.pre_process_models(student_model, teacher_model)
    self.strategy = strategy
    # What prepared the models puts them back, whatever loss is given meanwhile.
    self._prepared_by = strategy
    self.teacher_model = teacher
    self._student: nnx.Module | None = None  # as it was given; after `close`
    self._evaluating = False
    try:
      super().__init__(student, optimizer, training_config, metrics_logger, perf_tracer)
    except BaseException:  # whatever it was: the models go back as they were given
      strategy.post_process_models(student, teacher)
      raise
    self._teacher_score = self._make_teacher_score()

  def with_loss_fn(
    self, loss_fn: Callable[..., Any], has_aux: bool = False
  ) -> DistillationTrainer:
    """Replaces the strategy's `compute_loss`, as an override would: call it before
    training.

    Args:
      loss_fn: `loss_fn(student_output, teacher_output, labels)`; traced.
      has_aux: whether it returns a pair of the loss and a dict of scalars to log.

    Raises:
      TypeError: it takes other arguments.
    """
    self.strategy = self.strategy.with_loss(loss_fn, has_aux)
    self._state.forget_steps()
    self._teacher_score = self._make_teacher_score()
    return self

  def with_gen_model_input_fn(self, fn: Callable[[Any], Any]) -> DistillationTrainer:
    """`fn(batch)` gives the fields, by name, that the forward functions and labels_fn
    of the strategy are called with; traced."""
    super().with_gen_model_input_fn(fn)
    self._teacher_score = self._make_teacher_score()
    return self

  def get_train_loss(
    self, model: nnx.Module, teacher_output: Any, inputs: Inputs
  ) -> Any:
    """The loss of one micro-batch; traced."""
    return self.strategy.get_train_loss(model, teacher_output, inputs)

  def get_eval_loss(
    self, model: nnx.Module, teacher_output: Any, inputs: Inputs
  ) -> Any:
    """The same in evaluations; `teacher_output` is None if the strategy needs none."""
    return self.strategy.get_eval_loss(model, inputs, teacher_output)

  @property
  def model(self) -> nnx.Module:
    """The student with its current weights; until `close` as the strategy needs it."""
    current = super().model
    return current if self._student is None else self._student

  def close(self) -> None:
    """Saves what is not saved yet; hands the models back as they were given."""
    super().close()
    if self._student is None:
      self._student, self.teacher_model = self._prepared_by.post_process_models(
        super().model, self.teacher_model
      )

  def _prepare_inputs(self, batch: Any) -> Any:
    if self._student is not None:
      raise RuntimeError(
        "the trainer is closed and its models are as they were before: build another "
        "DistillationTrainer to go on"
      )
    batch = windows.as_pytree(batch)
    teacher_output = windows.field(batch, "teacher_output")
    if self._evaluating and not self.strategy.evaluates_with_teacher:
      teacher_output = None
    elif teacher_output is None:
      teacher_output = self._ask(batch)
    return Taught(_without_teacher(batch), teacher_output)

  def _prepare_window(self, batches: list[Any]) -> list[Any]:
    if self.strategy.labels_fn is None and not self._evaluating:
      windows.check_trained([self._loss.input_fn(b.batch) for b in batches])
    return batches

  def _train_step(self, model: nnx.Module, batch: Taught) -> Any:
    inputs = self._loss.input_fn(batch.batch)
    return self.get_train_loss(model, batch.teacher_output, inputs)

  def _eval_step(self, model: nnx.Module, batch: Taught) -> Any:
    inputs = self._loss.input_fn(batch.batch)
    return self.get_eval_loss(model, batch.teacher_output, inputs)

  def _eval_metrics(self, *args: Any) -> dict[str, float]:
    self._evaluating = True
    try:
      return super()._eval_metrics(*args)
    finally:
      self._evaluating = False

  def _ask(self, batch: Any) -> Any:
    """What the teacher says, on the student's devices."""
    teacher = self.teacher_model
    if teacher is None:
      raise ValueError(
        "there is no teacher, and a batch without teacher_output: give a "
        "teacher_model, or batches that bring it"
      )
    if isinstance(teacher, TeacherCache):
      return teacher.look_up(self._loss.input_fn(batch))
    axes = self.training_config.data_sharding_axis
    said = inference.apply(teacher, self._teacher_score, {"batch": batch}, axes)
    device = None if self._state.mesh is not None else self._state.devices()[0]
    return jax.tree.map(lambda x: to_device(x, device), said)

  def _make_teacher_score(self) -> Callable[..., Any]:
    """What the teacher computes: one object, so that it compiles once."""
    input_fn, strategy = self._loss.input_fn, self.strategy
    return lambda model, batch: strategy.get_teacher_outputs(model, input_fn(batch))


def _without_teacher(batch: Any) -> Any:
  """The batch for functions that know of no teacher."""
  if isinstance(batch, TrainingInput):
    return dataclasses.replace(batch, teacher_output=None)
  if isinstance(batch, Mapping):
    return {k: x for k, x in batch.items() if k != "teacher_output"}
  return batch


def _check_models(student: Any, teacher: Any) -> None:
  """Refuses what is no student or teacher.

  Raises:
    TypeError: it is of another kind.
    ValueError: the teacher holds Variables of the student that are trained: it would
      be taught by what it is becoming.
  """
  if not isinstance(student, nnx.Module):
    raise TypeError(
      f"student_model is a {type(student).__name__}, expected an nnx.Module: "
      "DistillationTrainer(student, teacher, strategy, optimizer, training_config)"
    )
  if teacher is not None and not isinstance(teacher, nnx.Module | TeacherCache):
    raise TypeError(
      f"teacher_model is a {type(teacher).__name__}, expected an nnx.Module, a "
      "TeacherCache, or None with batches that bring teacher_output"
    )
  if not isinstance(teacher, nnx.Module):
    return
  if share_variables(trained_variables(student).values(), teacher):
    raise ValueError(
      "student_model and teacher_model are one object or share trained Variables, so "
      "that the teacher would change as the student learns: give it as "
      "nnx.clone(student) or load it anew, or backbone.reference_of(student) for "
      "adapters"
    )
