"""LogitStrategy: the student's distribution of every token comes to be the teacher's.

With our models, or any that give hidden states and an unembedding, no logits are built:
the teacher's hidden states travel, and its unembedding lies beside the student's.
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
from tunix.ops.vocab_softmax import Layout
from tunix.utils import checks

Metrics = dict[str, jax.Array]


class HiddenStates(NamedTuple):
  """What a teacher says that has hidden states: told apart from logits by its type.

  Attributes:
    hidden: [B, T, D'] of its last layer.
  """

  hidden: Any


class LogitStrategy(BaseStrategy):
  """alpha T^2 D(teacher, student) + (1 - alpha) cross-entropy, means over the labelled
  tokens (arXiv:1503.02531; T^2 keeps the size of the gradients).

  Args:
    student_forward_fn, teacher_forward_fn, labels_fn: see BaseStrategy. Any of them
      given, the student's logits are built.
    temperature: T, of both distributions in D.
    alpha: share of the divergence, in [0, 1].
    distill_top_k: compare the teacher's so many likeliest words and the rest as one
      (`ops.distill.top_k_divergence`); 0: all words (with a TeacherCache: those it
      holds).
    divergence: "forward_kl", "reverse_kl" or "jsd", see `ops.distill`.
    beta: of jsd.

  Raises:
    ValueError: an option out of its range.
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
    # 0: all words.
    checks.number("distill_top_k", distill_top_k, checks.NOT_NEGATIVE, whole=True)
    self.alpha = alpha
    self.distill_top_k = distill_top_k
    # Decided at the door, in `pre_process_models`: whether steps and evaluations go
    # from the student's hidden states, and (not None) whether the teacher's travel.
    self._trains_unbuilt = False
    self._evaluates_unbuilt = False
    self._teacher_layout: Layout | None = None

  def pre_process_models(
    self, student_model: nnx.Module, teacher_model: Any
  ) -> tuple[nnx.Module, Any]:
    """Puts the teacher's unembedding beside the student, where it is needed."""
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
    self, student_model: nnx.Module, teacher_model: Any
  ) -> tuple[nnx.Module, Any]:
    """Takes it away."""
    # What was decided stays: another trainer may still train by this strategy.
    teacher_table.detach(student_model)
    return student_model, teacher_model

  def with_loss(self, loss_fn: Callable[..., Any], has_aux: bool = False) -> Self:
    """See BaseStrategy. The function gets logits, or a teacher's top k."""
    strategy = super().with_loss(loss_fn, has_aux)
    # Whatever was decided when the models were prepared, logits travel now.
    strategy._trains_unbuilt = strategy._evaluates_unbuilt = False
    strategy._teacher_layout = None
    return strategy

  def get_teacher_outputs(self, teacher_model: nnx.Module, inputs: Inputs) -> Any:
    """`HiddenStates`, logits, or the most likely words."""
    k = self.distill_top_k
    if self._teacher_layout is not None:
      out = HiddenStates(outputs.states(teacher_model, inputs))
    elif not k:
      out = super().get_teacher_outputs(teacher_model, inputs)
    elif self.teacher_forward_fn is None:
      out = outputs.top_words(teacher_model, inputs, k, self.how.temperature)
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
    # Logits come with the batch, of a teacher that is not here.
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
    """The mean over labelled tokens, and metrics in nats.

    Args:
      student_output: logits [B, T, V], or `Unembedded`.
      teacher_output: logits, a TopK, or `Unembedded` (with a student that is too).
      labels: see `outputs.task_loss`.

    Raises:
      ValueError: vocabularies or shapes that do not fit.
    """
    unbuilt = isinstance(student_output, Unembedded)
    compare = self._from_hidden if unbuilt else self._from_logits
    said, weights = compare(student_output, teacher_output, labels)
    mean = lambda x: jax.lax.stop_gradient(weighted_sum(x, weights).mean())
    gap = mean(said.divergence)
    metrics = {
      "distill/kl_div": gap,
      "distill/soft_loss": self.how.temperature**2 * gap,
      "distill/hard_loss": mean(said.nll),
    }
    if said.teacher_nll is not None:
      metrics["distill/teacher_loss"] = mean(said.teacher_nll)
    return WeightedSum(said.total, jnp.sum(weights)).mean(), metrics

  def compute_eval_loss(  # pyright: ignore[reportIncompatibleMethodOverride]
    self, student_output: Any, labels: Any
  ) -> tuple[jax.Array, Metrics]:
    """Cross-entropy of the student alone, in nats."""
    nll, weights = outputs.task_loss(student_output, labels)
    return weighted_sum(nll, weights).mean(), {}

  def loss_weight(self, labels: Any) -> jax.Array:
    """Labelled tokens."""
    return jnp.sum(outputs.label_weights(labels))

  @property
  def _factors(self) -> tuple[float, float]:
    """Of the divergence and of the cross-entropy."""
    return self.alpha * self.how.temperature**2, 1 - self.alpha

  def _from_hidden(self, student, teacher, labels) -> tuple[Distillation, jax.Array]:
    hard_labels = outputs.checked_labels(labels, student.hidden.shape[:-1])
    layouts = {"layout": student.layout}
    if isinstance(teacher, Unembedded):
      layouts["teacher_layout"] = teacher.layout
      teacher = States(teacher.hidden, teacher.table)
    soft, hard = self._factors
    said = weighted_distillation(
      student.hidden,
      student.table,
      teacher,
      *hard_labels,
      self.how,
      soft=soft,
      hard=hard,
      **layouts,
    )
    return said, hard_labels.weights

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
    """Whether the student has hidden states, and nothing of the user's reads logits."""
    methods = ["compute_loss", "get_labels", "get_train_loss"]
    methods += ["get_student_outputs", "get_teacher_outputs"]
    if self.evaluates_with_teacher:  # else it sees the student alone: `get_eval_loss`
      methods.append("compute_eval_loss")
    functions = (self.student_forward_fn, self.labels_fn)
    ours = all(map(self._is_ours, methods)) and functions == (None, None)
    return ours and not calling.adapt(student).builds_logits

  def _is_ours(self, name: str) -> bool:
    """Whether a method is LogitStrategy's: what a user put in its place, by a subclass
    or by `with_loss`, was written for logits."""
    method = getattr(getattr(self, name), "__func__", None)
    return method is getattr(LogitStrategy, name)

  def _has_states(self, teacher: Any) -> bool:
    """Whether the teacher's hidden states say all that is compared."""
    model = isinstance(teacher, nnx.Module) and not calling.adapt(teacher).builds_logits
    return model and self.teacher_forward_fn is None and not self.distill_top_k


def check_alpha(alpha: float) -> None:
  """Refuses shares that are none.

  Raises:
    ValueError: alpha is not in [0, 1].
  """
  checks.number("alpha", alpha, checks.SHARE)
