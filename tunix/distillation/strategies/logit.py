"""LogitStrategy: the student's distribution of every token comes to be the teacher's.

With our models, or any that give hidden states and an unembedding, no logits are built:
the teacher's hidden states travel, and its unembedding lies beside the student's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

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
from tunix.ops.distill_hidden import States, weighted_distillation
from tunix.ops.reductions import WeightedSum, weighted_sum
from tunix.ops.vocab_chunks import Layout

Metrics = dict[str, jax.Array]


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
    if distill_top_k < 0:
      raise ValueError(
        f"distill_top_k is {distill_top_k}: it must be a number of words, or 0 for all"
      )
    self.alpha = alpha
    self.distill_top_k = distill_top_k
    self._teacher_layout: Layout | None = None  # set when its table is attached

  def pre_process_models(
    self, student_model: nnx.Module, teacher_model: Any
  ) -> tuple[nnx.Module, Any]:
    """Puts the teacher's unembedding beside the student, where it is needed."""
    vocabulary.check_sizes(student_model, teacher_model)
    if isinstance(teacher_model, TeacherCache):
      teacher_model.check(self.distill_top_k, self.how.temperature)
    if self._is_chunked(student_model) and self._gives_states(teacher_model):
      self._teacher_layout = teacher_table.attach(student_model, teacher_model)
    return student_model, teacher_model

  def post_process_models(
    self, student_model: nnx.Module, teacher_model: Any
  ) -> tuple[nnx.Module, Any]:
    """Takes it away."""
    if self._teacher_layout is not None:
      teacher_table.detach(student_model)
      self._teacher_layout = None
    return student_model, teacher_model

  def with_loss(self, loss_fn: Callable[..., Any], has_aux: bool = False) -> Self:
    """See BaseStrategy. The function gets logits, or a teacher's top k."""
    strategy = super().with_loss(loss_fn, has_aux)
    # The teacher's table may lie beside the student already; its logits travel now.
    strategy._teacher_layout = None
    return strategy

  def get_teacher_outputs(self, teacher_model: nnx.Module, inputs: Inputs) -> Any:
    """Hidden states, logits, or the most likely words."""
    k = self.distill_top_k
    if self._teacher_layout is not None:
      out = outputs.states(teacher_model, inputs)
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
    if self._teacher_layout is not None and not isinstance(teacher_output, TopK):
      table = teacher_table.of(student_model)
      width = table.shape[1 if self._teacher_layout.transposed else 0]
      if teacher_output.shape[-1] == width:  # else logits that the batch brought
        teacher_output = Unembedded(teacher_output, table, self._teacher_layout)
    if not self._is_chunked(student_model) or isinstance(teacher_output, jax.Array):
      return super().get_train_loss(student_model, teacher_output, inputs)
    student, labels = outputs.output(student_model, inputs), self.get_labels(inputs)
    return self._weighted(self.compute_loss(student, teacher_output, labels), labels)

  def get_eval_loss(
    self, student_model: nnx.Module, inputs: Inputs, teacher_output: Any = None
  ) -> Any:
    """See BaseStrategy."""
    if not self._is_own("compute_eval_loss") or not self._is_chunked(student_model):
      return super().get_eval_loss(student_model, inputs, teacher_output)
    student, labels = outputs.output(student_model, inputs), self.get_labels(inputs)
    return self._weighted(self.compute_eval_loss(student, labels), labels)

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
    soft, hard = self.alpha * self.how.temperature**2, 1 - self.alpha
    if isinstance(student_output, Unembedded):
      found = self._from_hidden(student_output, teacher_output, labels, soft, hard)
      total, (gaps, nll, teacher_nll), weights = found
    else:
      if isinstance(teacher_output, TopK):
        gaps = distill.top_k_divergence(student_output, teacher_output, self.how)
        teacher_nll = None
      else:
        gaps = distill.divergence(student_output, teacher_output, self.how)
        teacher_nll = outputs.task_loss(teacher_output, labels).nll
      nll, weights = outputs.task_loss(student_output, labels)
      total = weighted_sum(soft * gaps + hard * nll, weights).total
    mean = lambda x: jax.lax.stop_gradient(weighted_sum(x, weights).mean())
    gap = mean(gaps)
    metrics = {
      "distill/kl_div": gap,
      "distill/soft_loss": self.how.temperature**2 * gap,
      "distill/hard_loss": mean(nll),
    }
    if teacher_nll is not None:
      metrics["distill/teacher_loss"] = mean(teacher_nll)
    return WeightedSum(total, jnp.sum(weights)).mean(), metrics

  def compute_eval_loss(  # pyright: ignore[reportIncompatibleMethodOverride]
    self, student_output: Any, labels: Any
  ) -> tuple[jax.Array, Metrics]:
    """Cross-entropy of the student alone, in nats."""
    nll, weights = outputs.task_loss(student_output, labels)
    return weighted_sum(nll, weights).mean(), {}

  def loss_weight(self, labels: Any) -> jax.Array:
    """Labelled tokens."""
    return jnp.sum(outputs.label_weights(labels))

  def _from_hidden(self, student, teacher, labels, soft, hard):
    hard_labels = outputs.checked_labels(labels, student.hidden.shape[:-1])
    layouts = {"layout": student.layout}
    if isinstance(teacher, Unembedded):
      layouts["teacher_layout"] = teacher.layout
      teacher = States(teacher.hidden, teacher.table)
    out = weighted_distillation(
      student.hidden,
      student.table,
      teacher,
      *hard_labels,
      self.how,
      soft=soft,
      hard=hard,
      **layouts,
    )
    return out.total, out[1:], hard_labels.weights

  def _is_chunked(self, student: nnx.Module) -> bool:
    """Whether nothing of the user's needs logits."""
    methods = ["compute_loss", "get_labels"]
    methods += ["get_student_outputs", "get_teacher_outputs"]
    if self.evaluates_with_teacher:  # else it sees the student alone: `get_eval_loss`
      methods.append("compute_eval_loss")
    own = all(self._is_own(name) for name in methods)
    functions = (self.student_forward_fn, self.labels_fn)
    return (
      own and functions == (None, None) and not calling.adapt(student).builds_logits
    )

  def _is_own(self, name: str) -> bool:
    """Whether a method is LogitStrategy's, and not overridden."""
    method = getattr(getattr(self, name), "__func__", None)
    return method is getattr(LogitStrategy, name)

  def _gives_states(self, teacher: Any) -> bool:
    model = isinstance(teacher, nnx.Module) and not calling.adapt(teacher).builds_logits
    return model and self.teacher_forward_fn is None and not self.distill_top_k


def check_alpha(alpha: float) -> None:
  """Refuses shares that are none.

  Raises:
    ValueError: alpha is not in [0, 1].
  """
  if not 0 <= alpha <= 1:
    raise ValueError(f"alpha is {alpha}: the share of the teacher must be in [0, 1]")
