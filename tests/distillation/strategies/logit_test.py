"""What subclasses of LogitStrategy may override."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tunix.distillation.strategies import LogitStrategy
from tunix.distillation.strategies.logit import HiddenStates
from tunix.ops.vocabulary.softmax import Layout

WORDS = 7
INPUTS = {
  "input_tokens": jnp.asarray([[1, 2, 3], [4, 5, 6]]),
  "input_mask": jnp.ones((2, 3), jnp.int32),
}


class Model(nnx.Module):
  """A table and an unembedding, with the seam for hidden states."""

  def __init__(self, seed, width):
    keys = jax.random.split(jax.random.key(seed))
    self.table = nnx.Param(jax.random.normal(keys[0], (WORDS, width)))
    self.head = nnx.Param(jax.random.normal(keys[1], (width, WORDS)))

  def unembedding(self):
    return self.head[...], Layout()

  def __call__(
    self,
    tokens,
    positions=None,
    cache=None,
    attention_mask=None,
    *,
    segment_ids=None,
    return_hidden=False,
  ):
    hidden = self.table[...][tokens]
    return hidden if return_hidden else hidden @ self.head[...], None


class EvaluatesBoth(LogitStrategy):
  def compute_eval_loss(self, student_output, teacher_output, labels):  # pyright: ignore
    assert student_output.shape == teacher_output.shape == (2, 3, WORDS)
    return jnp.mean(jnp.square(student_output - teacher_output)), {}


class Halved(LogitStrategy):
  def get_student_outputs(self, student_model, inputs):
    return super().get_student_outputs(student_model, inputs) / 2


class Shifted(LogitStrategy):
  def get_teacher_outputs(self, teacher_model, inputs):
    logits = super().get_teacher_outputs(teacher_model, inputs)
    return logits + jnp.arange(WORDS)


class Smoothed(LogitStrategy):
  def get_labels(self, inputs):
    return jnp.full((*inputs["input_tokens"].shape, WORDS), 1 / WORDS)


class Squared(LogitStrategy):
  def get_train_loss(self, student_model, teacher_output, inputs):
    student = self.get_student_outputs(student_model, inputs)
    return jnp.mean(jnp.square(student - teacher_output)), {}


def losses(strategy):
  """(evaluation, training, whether the teacher's table lay beside the student)."""
  student, teacher = strategy.pre_process_models(Model(0, 2), Model(1, 4))
  chunked = hasattr(student, "teacher_table")
  said = strategy.get_teacher_outputs(teacher, INPUTS)
  found = [
    strategy.get_eval_loss(student, INPUTS, said)[0],
    strategy.get_train_loss(student, said, INPUTS)[0],
  ]
  strategy.post_process_models(student, teacher)
  return *(float(x.mean()) for x in found), chunked


@pytest.mark.parametrize("has_aux", [False, True])
def test_a_loss_function_stands_for_compute_loss_and_sees_logits(has_aux):
  def squares(student_output, teacher_output, labels):
    assert student_output.shape == teacher_output.shape == (2, 3, WORDS)
    gap = jnp.sum(jnp.square(student_output - teacher_output), -1) * labels.weights
    loss = jnp.sum(gap) / jnp.sum(labels.weights)
    return (loss, {"gap": loss}) if has_aux else loss

  first = LogitStrategy()
  student, teacher = first.pre_process_models(Model(0, 2), Model(1, 4))
  strategy = first.with_loss(squares, has_aux)
  said = strategy.get_teacher_outputs(teacher, INPUTS)
  out = strategy.get_train_loss(student, said, INPUTS)
  gap = student(INPUTS["input_tokens"])[0] - teacher(INPUTS["input_tokens"])[0]
  gap = jnp.sum(jnp.square(gap), -1)[:, :-1]  # the last predicts nothing
  value = (out[0] if has_aux else out).mean()
  assert float(value) == pytest.approx(float(jnp.mean(gap)), rel=1e-5)
  with pytest.raises(TypeError, match="has_aux"):
    wrong = first.with_loss(squares, not has_aux)
    wrong.get_train_loss(student, said, INPUTS)
  first.post_process_models(student, teacher)
  assert not hasattr(student, "teacher_table")


def test_logits_of_a_batch_are_told_from_hidden_states_whatever_their_width():
  def loss(width):
    strategy = LogitStrategy()
    student, _ = strategy.pre_process_models(Model(0, 2), Model(1, width))
    logits = Model(2, 4)(INPUTS["input_tokens"])[0]
    return float(strategy.get_train_loss(student, logits, INPUTS)[0].mean())

  assert loss(WORDS) == loss(4)


def test_one_strategy_serves_trainers_beside_each_other():
  strategy, teacher = LogitStrategy(), Model(1, 4)
  students = Model(0, 2), Model(2, 2)
  for student in students:
    strategy.pre_process_models(student, teacher)
  said = strategy.get_teacher_outputs(teacher, INPUTS)
  want = strategy.get_train_loss(students[1], said, INPUTS)[0]
  strategy.post_process_models(students[0], teacher)
  said = strategy.get_teacher_outputs(teacher, INPUTS)
  assert isinstance(said, HiddenStates)
  assert strategy.get_train_loss(students[1], said, INPUTS)[0] == want
  strategy.post_process_models(students[1], teacher)
  assert not any(hasattr(student, "teacher_table") for student in students)


@pytest.mark.parametrize("kind", [EvaluatesBoth, Halved, Shifted, Smoothed, Squared])
def test_what_a_subclass_overrides_sees_logits_and_counts(kind):
  own, plain = losses(kind()), losses(LogitStrategy())
  assert (own[2], plain[2]) == (False, True)
  assert own[:2] != pytest.approx(plain[:2], rel=1e-3)


def test_an_evaluation_of_the_student_alone_leaves_the_steps_without_logits():
  class Perplexity(LogitStrategy):
    def compute_eval_loss(self, student_output, labels):
      assert student_output.shape == (2, 3, WORDS)
      loss, metrics = super().compute_eval_loss(student_output, labels)
      return 2 * loss, metrics

  own, plain = losses(Perplexity()), losses(LogitStrategy())
  assert own[2]
  assert own[0] == pytest.approx(2 * plain[0], rel=1e-5)
  assert own[1] == plain[1]
