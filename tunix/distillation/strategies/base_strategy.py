"""The extension point of distillation: what is compared, and by which loss."""

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

Forward = Callable[..., Any]


class BaseStrategy(abc.ABC):
  """A way to learn from a teacher. Subclasses write `compute_loss`.

  Called in this order: `pre_process_models` when the trainer is built;
  `get_teacher_outputs` for every batch, on the teacher's devices and without gradient;
  `get_train_loss` inside the step, which calls `get_student_outputs`, `get_labels` and
  `compute_loss`; `get_eval_loss` in evaluations; `post_process_models` on `close`.

  Args:
    student_forward_fn, teacher_forward_fn: `fn(model, **fields of the batch)` -> what
      `compute_loss` is to see; None: logits [B, T, V], by what the model's call takes.
    labels_fn: `fn(**fields of the batch)` -> labels; None: the next token of each, with
      weights from input_mask (`outputs.Labels`).
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
    """A copy whose `compute_loss` is `loss_fn`, for `DistillationTrainer.with_loss_fn`.

    Raises:
      TypeError: it takes other arguments.
    """
    _check_arguments(loss_fn, (3,))

    def compute_loss(student_output: Any, teacher_output: Any, labels: Any) -> Any:
      out = loss_fn(student_output, teacher_output, labels)
      is_pair = isinstance(out, tuple) and not isinstance(out, WeightedSum)
      if is_pair != has_aux:
        raise TypeError(
          f"the loss returned {'a tuple' if is_pair else 'no tuple'}, but has_aux is "
          f"{has_aux}: say with_loss_fn(fn, has_aux={is_pair})"
        )
      return out

    strategy = copy.copy(self)
    strategy.compute_loss = compute_loss
    return strategy

  @abc.abstractmethod
  def compute_loss(self, student_output: Any, teacher_output: Any, labels: Any) -> Any:
    """The loss of a micro-batch: a WeightedSum, or a scalar mean; or a pair of that and
    a dict of scalars to log. A scalar counts by `loss_weight`."""

  def compute_eval_loss(self, student_output: Any, teacher_output: Any, labels: Any):
    """The loss of an evaluation. An override may take (student_output, labels) alone:
    then the teacher does not run in evaluations."""
    return self.compute_loss(student_output, teacher_output, labels)

  def loss_weight(self, labels: Any) -> jax.Array | None:
    """What a scalar of `compute_loss` is the mean over; None: the batch's rows."""
    del labels
    return None

  def pre_process_models(
    self, student_model: nnx.Module, teacher_model: Any
  ) -> tuple[nnx.Module, Any]:
    """The models as the strategy needs them; undone by `post_process_models`."""
    return student_model, teacher_model

  def post_process_models(
    self, student_model: nnx.Module, teacher_model: Any
  ) -> tuple[nnx.Module, Any]:
    """The models as they were given."""
    return student_model, teacher_model

  def get_teacher_outputs(self, teacher_model: nnx.Module, inputs: Inputs) -> Any:
    """What travels to the student: arrays, the rows of the batch first."""
    forward = self.teacher_forward_fn or _logits
    return jax.lax.stop_gradient(outputs.call(forward, teacher_model, inputs=inputs))

  def get_student_outputs(self, student_model: nnx.Module, inputs: Inputs) -> Any:
    """What the student says, differentiable."""
    forward = self.student_forward_fn or _logits
    return outputs.call(forward, student_model, inputs=inputs)

  def get_labels(self, inputs: Inputs) -> Any:
    """What would be right."""
    if self.labels_fn is None:
      return outputs.next_tokens(inputs)
    return outputs.call(self.labels_fn, inputs=inputs)

  def get_train_loss(
    self, student_model: nnx.Module, teacher_output: Any, inputs: Inputs
  ) -> Any:
    """The training loss, as `compute_loss` gives it but weighted."""
    student = self.get_student_outputs(student_model, inputs)
    return self._compared(self.compute_loss, (student, teacher_output), inputs)

  def get_eval_loss(
    self, student_model: nnx.Module, inputs: Inputs, teacher_output: Any = None
  ) -> Any:
    """The evaluation's loss; the teacher's output only if it is asked for."""
    student = self.get_student_outputs(student_model, inputs)
    said = (student, teacher_output) if self.evaluates_with_teacher else (student,)
    return self._compared(self.compute_eval_loss, said, inputs)

  @property
  def evaluates_with_teacher(self) -> bool:
    """Whether `compute_eval_loss` takes the teacher's output."""
    return _fits(self.compute_eval_loss, 3)

  def _compared(
    self, compare: Callable[..., Any], said: tuple[Any, ...], inputs: Inputs
  ) -> Any:
    """`compare` of what was said and what would be right; a mean as a sum with its
    weight, so that micro-batches add up."""
    labels = self.get_labels(inputs)
    return self._weighted(compare(*said, labels), labels)

  def _weighted(self, out: Any, labels: Any) -> Any:
    weight = self.loss_weight(labels)
    if isinstance(out, WeightedSum) or weight is None:
      return out
    if isinstance(out, tuple):
      return self._weighted(out[0], labels), *out[1:]
    return WeightedSum(out * weight, weight)


def check(strategy: Any) -> None:
  """Refuses what cannot be called as strategies are.

  Raises:
    TypeError: no strategy, or methods that take other arguments.
  """
  if not isinstance(strategy, BaseStrategy):
    raise TypeError(
      f"strategy is a {type(strategy).__name__}, expected a BaseStrategy such as "
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


def _logits(model: Any, **inputs: Any) -> jax.Array:
  return outputs.logits(model, inputs)
