"""DistillationTrainer: trains a student on a teacher's outputs with a strategy.

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
from typing import Any, ClassVar, NamedTuple

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
from tunix.sft import inference
from tunix.sft.config import (
  TrainingConfig as _TrainingConfig,
  TrainingInput as _TrainingInput,
)
from tunix.sft.loop.trainer_arguments import Optimizer
from tunix.sft.metrics_logger import MetricsLogger
from tunix.sft.peft_trainer import PeftTrainer
from tunix.sft.steps import windows
from tunix.sft.steps.module_state import trained_variables
from tunix.utils import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig(_TrainingConfig):
  """Settings of a distillation, the same as those of every trainer."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainingInput(_TrainingInput):
  """One micro-batch, optionally with the teacher's output.

  Attributes:
    teacher_output: a result of `BaseStrategy.get_teacher_outputs`; None runs the
      teacher.
  """

  teacher_output: Any = None


class BatchWithTeacher(NamedTuple):
  """An unchanged batch of the user and the teacher's output for it."""

  batch: Any
  teacher_output: Any


class DistillationTrainer(PeftTrainer):
  """Trains a student to match a teacher on the same tokens.

  The teacher runs in eval mode and without gradient, outside the student's step, on its
  own mesh or device and in its own dtype. Subclasses may override `get_train_loss` and
  `get_eval_loss`. To compare student and teacher in a new way, write a strategy.

  Args:
    student_model: any module; if it has LoRA parameters, only those are trained. Until
      `close` the strategy may add modules or arrays to it.
    teacher_model: any module, a TeacherCache, or None if the batches have
      `teacher_output`.
    strategy: the comparison and its loss.
    optimizer, training_config, metrics_logger, perf_tracer: see PeftTrainer.
    tokenizers: the tokenizers of student and teacher, which are compared; None skips
      the check.

  Raises:
    TypeError: a method of the strategy has another signature.
    ValueError: the vocabularies or tokenizers differ, or see PeftTrainer.
  """

  # Kinds of `teacher_model`.
  _teachers: ClassVar[tuple[type, ...]] = (nnx.Module, TeacherCache)

  def __init__(
    self,
    student_model: nnx.Module,
    teacher_model: object,
    strategy: BaseStrategy,
    optimizer: Optimizer | None = None,
    training_config: _TrainingConfig | None = None,
    metrics_logger: MetricsLogger | None = None,
    *,
    tokenizers: tuple[Any, Any] | None = None,
    perf_tracer: NoopTracer | None = None,
  ):
    base_strategy.check(strategy)
    _check_models(student_model, teacher_model, self._teachers)
    if tokenizers is not None:
      vocabulary.check_tokenizers(*tokenizers)
    student, teacher = strategy.pre_process_models(student_model, teacher_model)
    self.strategy = strategy
    # `with_loss_fn` replaces `strategy`. The strategy that prepared the models must
    # restore them in `close`, so it is kept here.
    self._prepared_by = strategy
    self.teacher_model = teacher
    self._student: nnx.Module | None = None  # the restored student, after `close`
    self._evaluating = False
    try:
      super().__init__(student, optimizer, training_config, metrics_logger, perf_tracer)
    except BaseException:  # the caller must get the models back unchanged
      strategy.post_process_models(student, teacher)
      raise
    self._teacher_score = self._make_teacher_score()

  def with_loss_fn(
    self, loss_fn: Callable[..., Any], has_aux: bool = False
  ) -> DistillationTrainer:
    """Replaces the strategy's `compute_loss`; call it before training.

    Args:
      loss_fn: `loss_fn(student_output, teacher_output, labels)`; traced.
      has_aux: True if it returns a pair of the loss and a dict of scalars to log.

    Raises:
      TypeError: `loss_fn` has another signature.
    """
    self.strategy = self.strategy.with_loss(loss_fn, has_aux)
    self._state.forget_steps()
    self._teacher_score = self._make_teacher_score()
    return self

  def with_gen_model_input_fn(self, fn: Callable[[Any], Any]) -> DistillationTrainer:
    """Sets the function that converts a batch to inputs; returns the trainer.

    Args:
      fn: `fn(batch)` returns the fields by name that the strategy's forward functions
        and labels_fn receive; traced.
    """
    super().with_gen_model_input_fn(fn)
    self._teacher_score = self._make_teacher_score()
    return self

  def get_train_loss(
    self, model: nnx.Module, teacher_output: object, inputs: Inputs
  ) -> Any:
    """Computes the loss of one micro-batch; traced."""
    return self.strategy.get_train_loss(model, teacher_output, inputs)

  def get_eval_loss(
    self, model: nnx.Module, teacher_output: object, inputs: Inputs
  ) -> Any:
    """Computes the evaluation's loss of one micro-batch; traced.

    `teacher_output` is None if the strategy evaluates without the teacher.
    """
    return self.strategy.get_eval_loss(model, inputs, teacher_output)

  @property
  def model(self) -> nnx.Module:
    """The student with its current weights, prepared by the strategy until `close`."""
    current = super().model
    return current if self._student is None else self._student

  def close(self) -> None:
    """Saves unsaved updates and restores the models as they were passed in."""
    super().close()
    if self._student is None:
      self._student, self.teacher_model = self._prepared_by.post_process_models(
        super().model, self.teacher_model
      )

  def _prepare_inputs(self, batch: Any) -> Any:
    if self._student is not None:
      raise RuntimeError(
        "the trainer is closed and has restored its models: build another "
        "DistillationTrainer to continue"
      )
    batch = windows.as_pytree(batch)
    teacher_output = windows.field(batch, "teacher_output")
    if self._evaluating and not self.strategy.evaluates_with_teacher:
      teacher_output = None
    elif teacher_output is None:
      teacher_output = self._teacher_output(batch)
    return BatchWithTeacher(_without_teacher(batch), teacher_output)

  def _prepare_window(self, batches: list[Any]) -> list[Any]:
    if self.strategy.labels_fn is None and not self._evaluating:
      windows.check_trained([self._loss.input_fn(b.batch) for b in batches])
    return batches

  def _train_step(self, model: nnx.Module, batch: BatchWithTeacher) -> Any:
    inputs = self._loss.input_fn(batch.batch)
    return self.get_train_loss(model, batch.teacher_output, inputs)

  def _eval_step(self, model: nnx.Module, batch: BatchWithTeacher) -> Any:
    inputs = self._loss.input_fn(batch.batch)
    return self.get_eval_loss(model, batch.teacher_output, inputs)

  def _eval_metrics(self, *args: Any) -> dict[str, float]:
    self._evaluating = True
    try:
      return super()._eval_metrics(*args)
    finally:
      self._evaluating = False

  def _teacher_output(self, batch: object) -> Any:
    """Returns the teacher's output for a batch, on the student's devices."""
    teacher = self.teacher_model
    if teacher is None:
      raise ValueError(
        "teacher_model is None and a batch has no teacher_output: give a "
        "teacher_model, or add teacher_output to the batches"
      )
    if isinstance(teacher, TeacherCache):
      return teacher.look_up(self._loss.input_fn(batch))
    out = self._score(teacher, batch)
    # On a mesh, the step places the teacher's output like the rest of the batch.
    device = None if self._state.mesh is not None else self._state.devices()[0]
    return jax.tree.map(lambda x: to_device(x, device), out)

  def _score(self, teacher: Any, batch: object) -> Any:
    """Returns the teacher's output for a batch, on the teacher's devices."""
    axes = self.training_config.data_sharding_axis
    return inference.apply(teacher, self._teacher_score, {"batch": batch}, axes)

  def _make_teacher_score(self) -> Callable[..., Any]:
    """Returns the teacher's function; one object, so that JAX compiles it once."""
    input_fn, strategy = self._loss.input_fn, self.strategy
    return lambda model, batch: strategy.get_teacher_outputs(model, input_fn(batch))


def _without_teacher(batch: object) -> Any:
  """Returns the batch without `teacher_output`."""
  if isinstance(batch, TrainingInput):
    return dataclasses.replace(batch, teacher_output=None)
  if isinstance(batch, Mapping):
    return {k: x for k, x in batch.items() if k != "teacher_output"}
  return batch


def _check_models(
  student: nnx.Module, teacher: object, kinds: tuple[type, ...]
) -> None:
  """Checks the types of student and teacher, and that they share no trained weights.

  Raises:
    TypeError: a model has another type.
    ValueError: the teacher holds trained Variables of the student, and would change
      when the student does.
  """
  if not isinstance(student, nnx.Module):
    raise TypeError(
      f"student_model is {checks.type_of(student)}, expected an nnx.Module: "
      "DistillationTrainer(student, teacher, strategy, optimizer, training_config)"
    )
  if teacher is not None and not isinstance(teacher, kinds):
    names = ", ".join(kind.__name__ for kind in kinds)
    raise TypeError(
      f"teacher_model is {checks.type_of(teacher)}, expected one of {names}, or None "
      "with batches that have teacher_output"
    )
  models = getattr(teacher, "models", {"": teacher}).values()
  shared = trained_variables(student).values()
  if any(isinstance(m, nnx.Module) and share_variables(shared, m) for m in models):
    raise ValueError(
      "student_model and teacher_model are one object or share trained Variables, so "
      "that the teacher would change with the student: pass nnx.clone(student), load "
      "the teacher separately, or pass backbone.reference_of(student) for adapters"
    )
