"""LogitStrategy: matches the student's distribution of each token to the teacher's.

If both models have hidden states and an unembedding, as ours do, no logits [B, T, V]
are built. The teacher's output is then its hidden states, and its unembedding table is
attached to the student.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx

from tunix.distillation import outputs, teacher_table, vocabulary
from tunix.distillation.outputs import Inputs, Unembedded
from tunix.distillation.strategies.base_strategy import BaseStrategy, Forward
from tunix.distillation.teacher_cache import TeacherCache
from tunix.models import calling
from tunix.ops import distill
from tunix.ops.distill import Divergence, TopK
from tunix.ops.distill_hidden import Distillation, States, weighted_distillation
from tunix.ops.reductions import WeightedSum, weighted_sum
from tunix.ops.vocabulary.softmax import Layout
from tunix.utils import checks
from tunix.utils.metric import SAME, Metric

Metrics = dict[str, jax.Array]


class HiddenStates(NamedTuple):
  """The hidden states of a teacher; the type distinguishes them from logits.

  Attributes:
    hidden: hidden states of the last layer, [B, T, D'].
  """

  hidden: Any


METRICS = (
  Metric("distill/kl_div", "nats", "divergence from the teacher", "train", "", SAME),
  Metric(
    "distill/soft_loss", "nats", "temperature^2 distill/kl_div", "train", "", SAME
  ),
  Metric(
    "distill/hard_loss",
    "nats",
    "student's cross-entropy with the labels",
    "train",
    known_as=SAME,
  ),
  Metric(
    "distill/teacher_loss",
    "nats",
    "teacher's cross-entropy with the labels",
    "train",
    "if the teacher's whole distribution is known",
    SAME,
  ),
)


class LogitStrategy(BaseStrategy):
  """Minimizes alpha T^2 D(teacher, student) + (1 - alpha) cross-entropy.

  Both terms are means over the labeled tokens. T^2 keeps the gradients of D at the
  same size for every temperature (arXiv:1503.02531).

  Args:
    student_forward_fn, teacher_forward_fn, labels_fn: see BaseStrategy. If one of them
      is given, the student's logits are built.
    temperature: T, the temperature of both distributions in D.
    alpha: weight of the divergence, in [0, 1].
    distill_top_k: number of the teacher's most likely tokens that are compared; all
      other tokens count as one event (`ops.distill.top_k_divergence`). 0 compares the
      whole vocabulary, or with a TeacherCache the cached tokens.
    divergence: "forward_kl", "reverse_kl" or "jsd", see `ops.distill`.
    beta: weight of the teacher in the mixture of "jsd", in [0, 1].

  Raises:
    ValueError: an option is out of range.
  """

  def __init__(
    self,
    student_forward_fn: Forward | None = None,
    teacher_forward_fn: Forward | None = None,
    labels_fn: Callable[..., Any] | None = None,
    temperature: float = 2.0,
    alpha: float = 0.5,
    distill_top_k: int = 0,
    *,
    divergence: str = "forward_kl",
    beta: float | None = None,
  ):
    super().__init__(student_forward_fn, teacher_forward_fn, labels_fn)
    self.how = distill.checked(Divergence(divergence, beta, temperature))
    check_alpha(alpha)
    checks.number("distill_top_k", distill_top_k, checks.NOT_NEGATIVE, whole=True)
    self.alpha = alpha
    self.distill_top_k = distill_top_k
    # `pre_process_models` sets these: whether steps and evaluations compute from the
    # student's hidden states without logits, and the layout of the teacher's table if
    # the teacher's output is hidden states.
    self._trains_unbuilt = False
    self._evaluates_unbuilt = False
    self._teacher_layout: Layout | None = None

  def pre_process_models(
    self, student_model: nnx.Module, teacher_model: Any
  ) -> tuple[nnx.Module, Any]:
    """Attaches the teacher's unembedding to the student, if the strategy needs it."""
    vocabulary.check_sizes(student_model, teacher_model)
    if isinstance(teacher_model, TeacherCache):
      teacher_model.check(self.distill_top_k, self.how.temperature)
    self._trains_unbuilt = self._needs_no_logits(student_model)
    self._evaluates_unbuilt = self._trains_unbuilt and self._is_ours(
      "compute_eval_loss"
    )
    self._teacher_layout = None
    if self._trains_unbuilt and self._has_states(teacher_model):
      self._teacher_layout = teacher_table.attach(student_model, teacher_model)
    return student_model, teacher_model

  def post_process_models(
    self, student_model: nnx.Module, teacher_model: nnx.Module
  ) -> tuple[nnx.Module, Any]:
    """Removes the teacher's unembedding from the student."""
    # The settings stay: another trainer may still use this strategy.
    teacher_table.detach(student_model)
    return student_model, teacher_model

  def with_loss(self, loss_fn: Callable[..., Any], has_aux: bool = False) -> Self:
    """See BaseStrategy. The function receives logits, or the teacher's TopK."""
    strategy = super().with_loss(loss_fn, has_aux)
    # A user's loss reads logits, also if the models were prepared for hidden states.
    strategy._trains_unbuilt = strategy._evaluates_unbuilt = False
    strategy._teacher_layout = None
    return strategy

  def get_teacher_outputs(self, teacher_model: nnx.Module, inputs: Inputs) -> Any:
    """Returns `HiddenStates`, logits, or the teacher's TopK."""
    k = self.distill_top_k
    if self._teacher_layout is not None:
      out = HiddenStates(outputs.states(teacher_model, inputs))
    elif not k:
      out = super().get_teacher_outputs(teacher_model, inputs)
    elif self.teacher_forward_fn is None:
      out = outputs.top_tokens(teacher_model, inputs, k, self.how.temperature)
    else:
      logits = super().get_teacher_outputs(teacher_model, inputs)
      out = distill.top_k(logits, k, self.how.temperature)
    return jax.lax.stop_gradient(out)

  def get_train_loss(
    self, student_model: nnx.Module, teacher_output: Any, inputs: Inputs
  ) -> Any:
    """See BaseStrategy."""
    if isinstance(teacher_output, HiddenStates):
      assert self._teacher_layout is not None
      table = teacher_table.of(student_model)
      teacher_output = Unembedded(teacher_output.hidden, table, self._teacher_layout)
    # A batch may bring logits that a teacher computed before the training.
    if not self._trains_unbuilt or not isinstance(teacher_output, Unembedded | TopK):
      return super().get_train_loss(student_model, teacher_output, inputs)
    student = outputs.output(student_model, inputs)
    return self._compared(self.compute_loss, (student, teacher_output), inputs)

  def get_eval_loss(
    self, student_model: nnx.Module, inputs: Inputs, teacher_output: Any = None
  ) -> Any:
    """See BaseStrategy."""
    if not self._evaluates_unbuilt:
      return super().get_eval_loss(student_model, inputs, teacher_output)
    student = outputs.output(student_model, inputs)
    return self._compared(self.compute_eval_loss, (student,), inputs)

  def compute_loss(
    self, student_output: Any, teacher_output: Any, labels: Any
  ) -> tuple[jax.Array, Metrics]:
    """Returns the mean over labeled tokens, and metrics in nats.

    Args:
      student_output: logits [B, T, V], or `Unembedded`.
      teacher_output: logits, a TopK, or `Unembedded` if the student's is `Unembedded`.
      labels: see `outputs.task_loss`.

    Raises:
      ValueError: vocabularies or shapes do not match.
    """
    unbuilt = isinstance(student_output, Unembedded)
    compare = self._from_hidden if unbuilt else self._from_logits
    result, weights = compare(student_output, teacher_output, labels)

    def mean(x):
      return jax.lax.stop_gradient(weighted_sum(x, weights).mean())

    divergence = mean(result.divergence)
    metrics = {
      "distill/kl_div": divergence,
      "distill/soft_loss": self.how.temperature**2 * divergence,
      "distill/hard_loss": mean(result.nll),
    }
    if result.teacher_nll is not None:
      metrics["distill/teacher_loss"] = mean(result.teacher_nll)
    return WeightedSum(result.total, jnp.sum(weights)).mean(), metrics

  def compute_eval_loss(  # pyright: ignore[reportIncompatibleMethodOverride]
    self, student_output: Any, labels: Any
  ) -> tuple[jax.Array, Metrics]:
    """Returns the student's cross-entropy, in nats, and no metrics."""
    nll, weights = outputs.task_loss(student_output, labels)
    return weighted_sum(nll, weights).mean(), {}

  def loss_weight(self, labels: Any) -> jax.Array:
    """Returns the number of labeled tokens."""
    return jnp.sum(outputs.label_weights(labels))

  @property
  def _factors(self) -> tuple[float, float]:
    """The weights of the divergence and of the cross-entropy."""
    return self.alpha * self.how.temperature**2, 1 - self.alpha

  def _from_hidden(self, student, teacher, labels) -> tuple[Distillation, jax.Array]:
    hard_labels = outputs.checked_labels(labels, student.hidden.shape[:-1])
    layouts = {"layout": student.layout}
    if isinstance(teacher, Unembedded):
      layouts["teacher_layout"] = teacher.layout
      teacher = States(teacher.hidden, teacher.table)
    soft, hard = self._factors
    result = weighted_distillation(
      student.hidden,
      student.table,
      teacher,
      *hard_labels,
      self.how,
      soft=soft,
      hard=hard,
      **layouts,
    )
    return result, hard_labels.weights

  def _from_logits(self, student, teacher, labels) -> tuple[Distillation, jax.Array]:
    if isinstance(teacher, TopK):
      gaps = distill.top_k_divergence(student, teacher, self.how)
      teacher_nll = None
    else:
      gaps = distill.divergence(student, teacher, self.how)
      teacher_nll = outputs.task_loss(teacher, labels).nll
    nll, weights = outputs.task_loss(student, labels)
    soft, hard = self._factors
    total = weighted_sum(soft * gaps + hard * nll, weights).total
    return Distillation(total, gaps, nll, teacher_nll), weights

  def _needs_no_logits(self, student: nnx.Module) -> bool:
    """Returns whether the student has hidden states and no user code reads logits."""
    methods = ["compute_loss", "get_labels", "get_train_loss"]
    methods += ["get_student_outputs", "get_teacher_outputs"]
    if self.evaluates_with_teacher:  # otherwise `_evaluates_unbuilt` covers the method
      methods.append("compute_eval_loss")
    functions = (self.student_forward_fn, self.labels_fn)
    ours = all(map(self._is_ours, methods)) and functions == (None, None)
    return ours and not calling.adapt(student).builds_logits

  def _is_ours(self, name: str) -> bool:
    """Returns whether a method is LogitStrategy's own.

    A method of a subclass, or a loss of `with_loss`, was written for logits.
    """
    method = getattr(getattr(self, name), "__func__", None)
    return method is getattr(LogitStrategy, name)

  def _has_states(self, teacher: Any) -> bool:
    """Returns whether the teacher's hidden states are enough for the comparison."""
    model = isinstance(teacher, nnx.Module) and not calling.adapt(teacher).builds_logits
    return model and self.teacher_forward_fn is None and not self.distill_top_k


def check_alpha(alpha: float) -> None:
  """Checks the weight alpha.

  Raises:
    ValueError: alpha is not in [0, 1].
  """
  checks.number("alpha", alpha, checks.SHARE)
