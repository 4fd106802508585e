"""BaseStrategy, the extension point of distillation: a comparison and its loss."""

from __future__ import annotations

import abc
import copy
import inspect
from collections.abc import Callable
from typing import Any, Self

import jax
from flax import nnx

from tunix.distillation import outputs
from tunix.distillation.outputs import Inputs
from tunix.ops.reductions import WeightedSum
from tunix.utils import checks

Forward = Callable[..., Any]


class BaseStrategy(abc.ABC):
  """Compares a student with a teacher. Subclasses implement `compute_loss`.

  A trainer calls the methods in this order:

  1. `pre_process_models` when the trainer is built.
  2. `get_teacher_outputs` for every batch, on the teacher's devices, without gradient.
  3. `get_train_loss` inside the step. It calls `get_student_outputs`, `get_labels` and
     `compute_loss`. Evaluations call `get_eval_loss`.
  4. `post_process_models` when the trainer is closed.

  Args:
    student_forward_fn, teacher_forward_fn: `fn(model, **fields of the batch)`, whose
      result `compute_loss` receives. None returns logits [B, T, V].
    labels_fn: `fn(**fields of the batch)`, which returns labels. None returns the next
      token of each position with weights from input_mask (`outputs.Labels`).
  """

  student_forward_fn: Forward | None = None
  teacher_forward_fn: Forward | None = None
  labels_fn: Callable[..., Any] | None = None

  def __init__(
    self,
    student_forward_fn: Forward | None = None,
    teacher_forward_fn: Forward | None = None,
    labels_fn: Callable[..., Any] | None = None,
  ):
    self.student_forward_fn = student_forward_fn
    self.teacher_forward_fn = teacher_forward_fn
    self.labels_fn = labels_fn

  def with_loss(self, loss_fn: Callable[..., Any], has_aux: bool = False) -> Self:
    """Returns a copy with `loss_fn` as `compute_loss`.

    `DistillationTrainer.with_loss_fn` calls it.

    Raises:
      TypeError: `loss_fn` has another signature.
    """
    _check_arguments(loss_fn, (3,))

    def compute_loss(student_output: Any, teacher_output: Any, labels: Any) -> Any:
      out = loss_fn(student_output, teacher_output, labels)
      is_pair = isinstance(out, tuple) and not isinstance(out, WeightedSum)
      if is_pair != has_aux:
        raise TypeError(
          f"has_aux is {has_aux} and the loss returned "
          f"{'a tuple' if is_pair else 'no tuple'}: use has_aux={is_pair}"
        )
      return out

    strategy = copy.copy(self)
    strategy.compute_loss = compute_loss
    return strategy

  @abc.abstractmethod
  def compute_loss(self, student_output: Any, teacher_output: Any, labels: Any) -> Any:
    """Computes the loss of a micro-batch.

    Returns:
      A WeightedSum, or a scalar mean with the weight of `loss_weight`; or a pair of one
      of these and a dict of scalars to log.
    """

  def compute_eval_loss(self, student_output: Any, teacher_output: Any, labels: Any):
    """Computes the loss of an evaluation.

    An override may take only (student_output, labels). The teacher then does not run in
    evaluations.
    """
    return self.compute_loss(student_output, teacher_output, labels)

  def loss_weight(self, labels: Any) -> jax.Array | None:
    """Returns the weight of a scalar of `compute_loss`; None is the number of rows."""
    del labels
    return None

  def pre_process_models(
    self, student_model: nnx.Module, teacher_model: Any
  ) -> tuple[nnx.Module, Any]:
    """Prepares the models for the strategy; `post_process_models` undoes it."""
    return student_model, teacher_model

  def post_process_models(
    self, student_model: nnx.Module, teacher_model: nnx.Module
  ) -> tuple[nnx.Module, Any]:
    """Restores the models that `pre_process_models` prepared."""
    return student_model, teacher_model

  def get_teacher_outputs(self, teacher_model: nnx.Module, inputs: Inputs) -> Any:
    """Returns the teacher's output for the student: arrays with the rows first."""
    forward = self.teacher_forward_fn or _logits
    return jax.lax.stop_gradient(outputs.call(forward, teacher_model, inputs=inputs))

  def get_student_outputs(self, student_model: nnx.Module, inputs: Inputs) -> Any:
    """Returns the student's output, with gradient."""
    forward = self.student_forward_fn or _logits
    return outputs.call(forward, student_model, inputs=inputs)

  def get_labels(self, inputs: Inputs) -> Any:
    """Returns the labels of a batch."""
    if self.labels_fn is None:
      return outputs.next_tokens(inputs)
    return outputs.call(self.labels_fn, inputs=inputs)

  def get_train_loss(
    self, student_model: nnx.Module, teacher_output: Any, inputs: Inputs
  ) -> Any:
    """Computes the training loss: `compute_loss` with its weight."""
    student = self.get_student_outputs(student_model, inputs)
    return self._compared(self.compute_loss, (student, teacher_output), inputs)

  def get_eval_loss(
    self, student_model: nnx.Module, inputs: Inputs, teacher_output: Any = None
  ) -> Any:
    """Computes the evaluation's loss: `compute_eval_loss` with its weight."""
    student = self.get_student_outputs(student_model, inputs)
    both = (student, teacher_output) if self.evaluates_with_teacher else (student,)
    return self._compared(self.compute_eval_loss, both, inputs)

  @property
  def evaluates_with_teacher(self) -> bool:
    """True if `compute_eval_loss` takes the teacher's output."""
    return _fits(self.compute_eval_loss, 3)

  def _compared(
    self, compute: Callable[..., Any], model_outputs: tuple[Any, ...], inputs: Inputs
  ) -> Any:
    """Calls `compute` with the labels; converts a mean to a sum with its weight.

    Sums of micro-batches with different numbers of tokens add up; means would not.
    """
    labels = self.get_labels(inputs)
    return self._weighted(compute(*model_outputs, labels), labels)

  def _weighted(self, out: Any, labels: Any) -> Any:
    weight = self.loss_weight(labels)
    if isinstance(out, WeightedSum) or weight is None:
      return out
    if isinstance(out, tuple):
      return self._weighted(out[0], labels), *out[1:]
    return WeightedSum(out * weight, weight)


def check(strategy: Any) -> None:
  """Checks the type and the method signatures of a strategy.

  Raises:
    TypeError: it is not a BaseStrategy, or a method has another signature.
  """
  if not isinstance(strategy, BaseStrategy):
    raise TypeError(
      f"strategy is {checks.type_of(strategy)}, expected a BaseStrategy such as "
      "LogitStrategy(temperature=2.0)"
    )
  _check_arguments(strategy.compute_loss, (3,))
  _check_arguments(strategy.compute_eval_loss, (3, 2))


def _check_arguments(method: Any, counts: tuple[int, ...]) -> None:
  names = list(inspect.signature(method).parameters)
  right = any(_fits(method, n) for n in counts)
  swapped = any("teacher" in n for n in names[:1]) or any(
    "student" in n for n in names[1:2]
  )
  if right and not swapped:
    return
  forms = {3: "(student_output, teacher_output, labels)", 2: "(student_output, labels)"}
  raise TypeError(
    f"{method.__qualname__} takes ({', '.join(names)}): strategies are called with "
    + " or ".join(forms[n] for n in counts)
    + ", the student first"
  )


def _fits(method: Any, count: int) -> bool:
  try:
    inspect.signature(method).bind(*range(count))
  except TypeError:
    return False
  return True


def _logits(model: nnx.Module, **inputs: Any) -> jax.Array:
  return outputs.logits(model, inputs)
