"""The reverse KL by its policy gradient, on what the student itself wrote."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tunix.distillation import outputs, vocabulary
from tunix.distillation.outputs import Inputs, Labels
from tunix.distillation.strategies.base_strategy import BaseStrategy
from tunix.ops import distill
from tunix.ops.distill import Divergence
from tunix.ops.policy_gradient import reinforce_loss
from tunix.ops.reductions import weighted_sum


class PolicyGradientStrategy(BaseStrategy):
  """-A_t log q(y_t) with A_t = log p(y_t) - log q(y_t), a constant, at each token.

  Where the student q drew the tokens, the expected gradient is that of the reverse KL
  at every prefix, KL(q || p), without a token's effect on later prefixes. It needs the
  teacher p at the drawn tokens alone. On tokens of anyone else's it is wrong: use it
  with `OnPolicyDistillationTrainer` and on_policy_fraction 1.

  Args:
    temperature: of both distributions: that of the sampling.

  Raises:
    ValueError: a temperature that is not above 0.
  """

  def __init__(self, *, temperature: float = 1.0):
    super().__init__()
    distill.checked(Divergence(temperature=temperature))
    self.temperature = temperature

  def pre_process_models(
    self, student_model: nnx.Module, teacher_model: Any
  ) -> tuple[nnx.Module, Any]:
    """Checks the vocabularies."""
    vocabulary.check_sizes(student_model, teacher_model)
    return student_model, teacher_model

  def get_teacher_outputs(self, teacher_model: nnx.Module, inputs: Inputs) -> Any:
    """[B, T] log p of the right tokens."""
    return jax.lax.stop_gradient(self._logps(teacher_model, inputs))

  def get_student_outputs(self, student_model: nnx.Module, inputs: Inputs) -> Any:
    """[B, T] log q of the right tokens."""
    return self._logps(student_model, inputs)

  def compute_loss(
    self, student_output: Any, teacher_output: Any, labels: Labels
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The mean over labelled tokens; its value says nothing, its gradient does.

    The metric `distill/reverse_kl` is the mean of log q - log p, in nats.
    """
    advantages = teacher_output - jax.lax.stop_gradient(student_output)
    values = reinforce_loss(student_output, advantages)
    gap = weighted_sum(-advantages, labels.weights).mean()
    loss = weighted_sum(values, labels.weights).mean()
    return loss, {"distill/reverse_kl": gap}

  def compute_eval_loss(
    self, student_output: Any, teacher_output: Any, labels: Labels
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The mean of log q - log p: of the student's own samples, its reverse KL."""
    gaps = student_output - teacher_output
    return weighted_sum(gaps, labels.weights).mean(), {}

  def loss_weight(self, labels: Labels) -> jax.Array:
    """Labelled tokens."""
    return jnp.sum(labels.weights)

  def _logps(self, model: Any, inputs: Inputs) -> jax.Array:
    targets = self.get_labels(inputs).targets
    return outputs.token_logps(model, inputs, targets, self.temperature)
