"""PolicyGradientStrategy: the reverse KL by its policy gradient, on student samples."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from tunix.distillation import outputs, vocabulary
from tunix.distillation.outputs import Inputs, Labels
from tunix.distillation.strategies.base_strategy import BaseStrategy
from tunix.ops import distill
from tunix.ops.distill import Divergence
from tunix.ops.policy_gradient import reinforce_loss
from tunix.ops.reductions import span_sums, weighted_sum
from tunix.utils.metric import Metric

METRICS = (
  Metric(
    "distill/reverse_kl",
    "nats",
    "mean of log q - log p on the student's samples",
    "train",
  ),
)


class SpanScores(NamedTuple):
  """The output of a teacher with another tokenizer.

  Attributes:
    logps: float32 [B, T], log p of a span at the position of its last token, else 0.
    ends: int32 [B, T], for each position that of the last token of its span.
  """

  logps: Any
  ends: Any


class PolicyGradientStrategy(BaseStrategy):
  """Minimizes -A_t log q(y_t) at each token, with A_t = log p(y_t) - log q(y_t).

  A_t is a constant without gradient. If the student q sampled the tokens, the expected
  gradient is that of the reverse KL at every prefix, KL(q || p), without the effect of
  a token on later prefixes. The teacher p is needed only at the sampled tokens. On
  tokens that the student did not sample the gradient is wrong: use the strategy with
  `OnPolicyDistillationTrainer` and `on_policy_fraction` 1.

  With a `TextTeacher` the tokens of both are aligned to spans of text (see
  `distillation.alignment`), and A_t is that of the token's span s: log p(s) - log q(s),
  each the sum over its own tokens. If all spans are single tokens, nothing changes.

  Args:
    temperature: temperature of both distributions, equal to the sampling temperature.

  Raises:
    ValueError: the temperature is not above 0.
  """

  def __init__(self, *, temperature: float = 1.0):
    super().__init__()
    distill.checked(Divergence(temperature=temperature))
    self.temperature = temperature

  def pre_process_models(
    self, student_model: nnx.Module, teacher_model: Any
  ) -> tuple[nnx.Module, Any]:
    """Checks the sizes of the vocabularies."""
    vocabulary.check_sizes(student_model, teacher_model)
    return student_model, teacher_model

  def get_teacher_outputs(self, teacher_model: nnx.Module, inputs: Inputs) -> Any:
    """Returns log p of the labels, [B, T]."""
    return jax.lax.stop_gradient(self._logps(teacher_model, inputs))

  def get_student_outputs(self, student_model: nnx.Module, inputs: Inputs) -> Any:
    """Returns log q of the labels, [B, T]."""
    return self._logps(student_model, inputs)

  def compute_loss(
    self, student_output: Any, teacher_output: Any, labels: Labels
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the mean over labeled tokens, and the metric `distill/reverse_kl`.

    Only the gradient of the loss has a meaning, not its value. The metric is the mean
    of log q - log p, in nats per token of the student.
    """
    logps, ends = _scores(teacher_output)
    gaps = logps - jax.lax.stop_gradient(student_output)
    advantages = gaps if ends is None else span_sums(gaps, ends)
    values = reinforce_loss(student_output, advantages)
    gap = weighted_sum(-gaps, labels.weights).mean()
    loss = weighted_sum(values, labels.weights).mean()
    return loss, {"distill/reverse_kl": gap}

  def compute_eval_loss(
    self, student_output: Any, teacher_output: Any, labels: Labels
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the mean of log q - log p, the reverse KL on the student's samples."""
    gaps = student_output - _scores(teacher_output).logps
    return weighted_sum(gaps, labels.weights).mean(), {}

  def loss_weight(self, labels: Labels) -> jax.Array:
    """Returns the number of labeled tokens."""
    return jnp.sum(labels.weights)

  def _logps(self, model: nnx.Module, inputs: Inputs) -> jax.Array:
    targets = self.get_labels(inputs).targets
    return outputs.token_logps(model, inputs, targets, self.temperature)


def _scores(output: Any) -> SpanScores:
  return output if isinstance(output, SpanScores) else SpanScores(output, None)
