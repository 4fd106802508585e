"""The trainer: losses by hand, batches, meshes, and what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import optimizers, toys
from tests.distillation import trainers
from tests.sft import trainers as sft
from tunix.distillation.distillation_trainer import (
  DistillationTrainer,
  TrainingConfig,
  TrainingInput,
)
from tunix.distillation.outputs import Labels
from tunix.distillation.strategies import BaseStrategy, LogitStrategy
from tunix.ops import distill, masks
from tunix.ops.distill import Divergence
from tunix.sft.peft_trainer import PeftTrainer
from tunix.utils import mesh as mesh_lib


class Square(BaseStrategy):
  """A user's strategy, on logits."""

  def compute_loss(self, student_output, teacher_output, labels):
    gap = jnp.mean(jnp.square(student_output - teacher_output), axis=-1)
    return jnp.sum(gap * labels.weights) / jnp.sum(labels.weights)

  def loss_weight(self, labels):
    return jnp.sum(labels.weights)


def by_hand(student, known, batch, *, temperature=2.0, alpha=0.5):
  """The loss of LogitStrategy from logits."""
  tokens = batch["input_tokens"]
  weights = masks.target_weights(batch["input_mask"], batch["segment_ids"])
  said = [m(tokens, segment_ids=batch["segment_ids"])[0] for m in (student, known)]
  gaps = distill.divergence(*said, Divergence("forward_kl", None, temperature))
  nll = -jnp.take_along_axis(
    jax.nn.log_softmax(said[0]), jnp.roll(tokens, -1, 1)[..., None], -1
  )[..., 0]
  values = alpha * temperature**2 * gaps + (1 - alpha) * nll
  return float(jnp.sum(values * weights) / jnp.sum(weights))


def test_loss_and_metrics_by_hand():
  student, known, batch = trainers.fresh_student(), trainers.teacher(), toys.batch(0)
  want = by_hand(student, known, batch)
  hard = by_hand(student, known, batch, alpha=0.0)
  t = trainers.trainer(student=student, known=known)
  assert isinstance(t, PeftTrainer)
  t.train([batch], [batch])
  np.testing.assert_allclose(sft.history(t, "loss"), [want], rtol=1e-5)
  np.testing.assert_allclose(sft.history(t, "distill/hard_loss"), [hard], rtol=1e-5)
  # An evaluation is the student's own task loss.
  np.testing.assert_allclose(sft.history(t, "loss", "eval")[0], hard, rtol=1e-5)
  gap = sft.history(t, "distill/kl_div")[0]
  np.testing.assert_allclose(0.5 * 4 * gap + 0.5 * hard, want, rtol=1e-5)
  np.testing.assert_allclose(sft.history(t, "distill/soft_loss"), [4 * gap], rtol=1e-6)
  own = by_hand(known, student, batch, alpha=0.0)
  np.testing.assert_allclose(sft.history(t, "distill/teacher_loss"), [own], rtol=1e-5)


def test_padding_changes_nothing():
  batch = toys.batch(0)
  longer = {k: np.pad(x, ((0, 0), (0, 5))) for k, x in batch.items()}
  longer["input_tokens"][:, -5:] = 7
  losses = []
  for given in (batch, longer):
    t = trainers.trainer()
    t.train([given])
    losses.append(sft.history(t, "loss")[0])
  np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_no_logits_are_built(lora_rank):
  batch = toys.batch(0, rows=4, length=32)
  student = trainers.fresh_student(lora_rank=lora_rank)
  t = trainers.trainer(student=student)
  text = t.lower_train_step(batch).as_text()
  assert f"4x32x{toys.VOCAB}x" not in text
  plain = trainers.trainer(Square())
  assert f"4x32x{toys.VOCAB}x" in plain.lower_train_step(batch).as_text()


def test_the_table_is_neither_trained_nor_saved_nor_left_behind(tmp_path):
  student, known = trainers.fresh_student(), trainers.teacher()
  before = sft.leaves(known)
  t = trainers.trainer(
    student=student, known=known, checkpoint_root_directory=str(tmp_path)
  )
  assert not hasattr(trainers.fresh_student(), "teacher_table")
  assert student.teacher_table[...] is known.lm_head.kernel[...]  # no second copy
  t.train([toys.batch(0)])
  t.close()
  assert t.model is student and t.teacher_model is known
  assert sft.leaves(student).keys() == sft.leaves(trainers.fresh_student()).keys()
  assert sft.equal(sft.leaves(known), before)
  saved = PeftTrainer(  # a plain trainer of the student reads it
    trainers.fresh_student(),
    optimizers.adam(1e-2),
    TrainingConfig(checkpoint_root_directory=str(tmp_path)),
  )
  assert saved.train_steps == 1
  assert sft.equal(sft.leaves(saved.model), sft.leaves(student))
  with pytest.raises(RuntimeError, match="closed"):
    t.train([toys.batch(0)])


def test_a_users_strategy_gets_logits_and_its_own_fields():
  seen = {}

  def forward(model, input_tokens, flavour):
    seen["flavour"] = flavour.shape
    return model(input_tokens)[0]

  def labels(input_mask, **others):
    seen["others"] = sorted(others)
    return input_mask.astype(jnp.float32)

  class Own(BaseStrategy):
    def compute_loss(self, student_output, teacher_output, labels):
      seen["shapes"] = student_output.shape, teacher_output.shape, labels.shape
      return jnp.mean(jnp.square(student_output - teacher_output))

  batch = {**toys.batch(0), "flavour": np.ones((8, 3), np.float32)}
  t = trainers.trainer(Own(forward, forward, labels))
  t.train([batch])
  shape = 8, 16, toys.VOCAB
  assert seen["shapes"] == (shape, shape, (8, 16))
  assert seen["flavour"] == (8, 3)
  assert seen["others"] == ["flavour", "input_tokens", "segment_ids"]


def test_googles_form_with_one_hot_labels():
  """Forward functions and one-hot labels, as positional arguments."""

  def forward(model, input_tokens, input_mask):
    del input_mask
    return model(input_tokens)[0]

  def labels(input_tokens, input_mask):
    one_hot = jax.nn.one_hot(jnp.roll(input_tokens, -1, 1), toys.VOCAB)
    return one_hot * masks.target_weights(input_mask)[..., None]

  batch = toys.batch(0)
  del batch["segment_ids"]
  losses = []
  for strategy in (LogitStrategy(forward, forward, labels, 2.0, 0.5), LogitStrategy()):
    t = trainers.trainer(strategy)
    t.train([batch], [batch])
    losses.append([sft.history(t, "loss")[0], sft.history(t, "loss", "eval")[0]])
  np.testing.assert_allclose(*losses, rtol=1e-5)


def test_gen_model_input_fn_names_the_fields():
  batch, t = toys.batch(0), trainers.trainer()
  plain = trainers.trainer()
  plain.train([batch])
  renamed = {"words": batch["input_tokens"], "mask": batch["input_mask"]}
  renamed["segments"] = batch["segment_ids"]
  names = {
    "input_tokens": "words",
    "input_mask": "mask",
    "segment_ids": "segments",
  }
  t.with_gen_model_input_fn(lambda b: {k: b[v] for k, v in names.items()})
  t.train([renamed])
  assert sft.history(t, "loss") == sft.history(plain, "loss")


def test_teacher_output_of_the_batch_is_taken():
  """As logits: then the student's are built. The teacher is not asked, or needed."""
  batch, known = toys.batch(0), trainers.teacher()
  want = trainers.trainer(known=known)
  want.train([batch])
  logits = np.asarray(known(batch["input_tokens"], segment_ids=batch["segment_ids"])[0])
  t = DistillationTrainer(
    trainers.fresh_student(),
    None,
    LogitStrategy(),
    optimizers.adam(1e-2),
    TrainingConfig(pbar_description=None),
  )
  t.train([TrainingInput(**batch, teacher_output=logits)])
  np.testing.assert_allclose(
    sft.history(t, "loss"), sft.history(want, "loss"), rtol=1e-5
  )
  with pytest.raises(ValueError, match="teacher_model is None"):
    t.train([batch])
  beside = trainers.trainer(known=trainers.teacher(seed=5))  # with a teacher too
  beside.train([TrainingInput(**batch, teacher_output=logits)])
  np.testing.assert_allclose(
    sft.history(beside, "loss"), sft.history(want, "loss"), rtol=1e-5
  )


def test_user_models_on_both_sides():
  t = trainers.trainer(student=sft.tokens_only(0), known=sft.tokens_only(1))
  t.train([sft.small(0)] * 3)
  losses = sft.history(t, "loss")
  assert losses[-1] < losses[0]


@pytest.mark.parametrize("where", ["student", "teacher", "both"])
def test_meshes_of_their_own(where, mesh_fsdp8):
  """On a mesh of all devices, of two others, or alone: the same loss."""
  want = trainers.trainer()
  want.train([toys.batch(0)] * 2)
  student, known = trainers.fresh_student(), trainers.teacher()
  if where != "student":
    other = mesh_lib.create_mesh({"fsdp": 2}, jax.devices()[4:6])
    with jax.set_mesh(other):
      known = PeftTrainer(known, optimizers.sgd(0.0)).model
    assert len(known.lm_head.kernel[...].devices()) == 2
  with mesh_lib.use_mesh(None if where == "teacher" else mesh_fsdp8):
    t = trainers.trainer(student=student, known=known)
    t.train([toys.batch(0)] * 2)
  np.testing.assert_allclose(
    sft.history(t, "loss"), sft.history(want, "loss"), rtol=1e-5
  )


def test_a_teacher_in_another_dtype():
  half = trainers.teacher(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
  t = trainers.trainer(known=half)
  t.train([toys.batch(0)])
  assert t.model.teacher_table[...].dtype == jnp.bfloat16
  want = trainers.trainer()
  want.train([toys.batch(0)])
  np.testing.assert_allclose(
    sft.history(t, "loss"), sft.history(want, "loss"), rtol=2e-2
  )


def test_the_teacher_does_not_drop_out():
  """A teacher in train mode with dropout says the same every time."""
  known = sft.tokens_only(1, rate=0.5)
  known.train()
  t = trainers.trainer(student=sft.tokens_only(0), known=known)
  asked = [t._teacher_output(sft.small(0)) for _ in range(2)]
  np.testing.assert_array_equal(*asked)


class TwoArguments(BaseStrategy):
  def compute_loss(self, teacher_output, student_output):  # pyright: ignore
    return 0.0


class TeacherFirst(BaseStrategy):
  def compute_loss(self, teacher_output, student_output, labels):  # pyright: ignore
    return 0.0


class EvalOfFour(Square):
  def compute_eval_loss(self, a, b, c, d):  # pyright: ignore
    return 0.0


@pytest.mark.parametrize("strategy", [TwoArguments, TeacherFirst, EvalOfFour])
def test_other_signatures_are_refused(strategy):
  with pytest.raises(TypeError, match="the student first"):
    trainers.trainer(strategy())


def test_wrong_kinds_are_refused():
  with pytest.raises(TypeError, match="expected a BaseStrategy"):
    trainers.trainer("logit")
  with pytest.raises(TypeError, match="student_model is a str"):
    trainers.trainer(student="model")
  with pytest.raises(TypeError, match="teacher_model is a str"):
    trainers.trainer(known="model")
  same = trainers.fresh_student()
  for teacher in (same, nnx.merge(*nnx.split(same))):  # shares its Variables
    with pytest.raises(ValueError, match="one object or share trained Variables"):
      trainers.trainer(student=same, known=teacher)
  with pytest.raises(TypeError, match="strategies are called with"):
    trainers.trainer().with_loss_fn(lambda model: 0.0)


def test_vocabularies_that_differ_are_refused():
  with pytest.raises(ValueError, match=r"96.*90"):
    trainers.trainer(known=trainers.teacher(vocab_size=90))


def test_a_failure_in_the_constructor_leaves_the_student_as_it_was():
  student = trainers.fresh_student()
  with pytest.raises(ValueError, match="optimizer"):
    DistillationTrainer(student, trainers.teacher(), LogitStrategy())
  assert not hasattr(student, "teacher_table")


def test_nothing_to_train_on_is_refused():
  batch = toys.batch(0)
  batch["input_mask"][:] = 0
  with pytest.raises(ValueError, match="trained"):
    trainers.trainer().train([batch])


def loss_of(logits, **options):
  labels = Labels(jnp.zeros((2, 3), jnp.int32), jnp.ones((2, 3)))
  return float(LogitStrategy(**options).compute_loss(*logits, labels)[0])


def test_options_change_the_loss():
  logits = tuple(2 * jax.random.normal(jax.random.key(0), (2, 2, 3, 7)))
  # Top k words are a teacher's output: see test_top_k_of_a_teacher.
  found = [
    loss_of(logits, **options)
    for options in (
      {},
      {"temperature": 1.0},
      {"alpha": 0.9},
      {"divergence": "reverse_kl"},
      {"divergence": "jsd", "beta": 0.3},
      {"divergence": "jsd", "beta": 0.7},
    )
  ]
  assert len({round(x, 3) for x in found}) == len(found)


@pytest.mark.parametrize("make", [trainers.teacher, lambda: sft.tokens_only(1)])
def test_top_k_of_a_teacher(make):
  """Of our model's hidden states, of a user's logits; of all words it is the whole."""
  known, inputs = make(), {"input_tokens": jnp.asarray(toys.batch(0)["input_tokens"])}
  student = 3 * jax.random.normal(jax.random.key(0), (8, 16, toys.VOCAB))
  labels = Labels(inputs["input_tokens"], jnp.ones((8, 16)))
  losses = []
  for k in (0, 3, toys.VOCAB):
    strategy = LogitStrategy(distill_top_k=k)
    said = strategy.get_teacher_outputs(known, inputs)
    assert k == 0 or said.ids.shape == (8, 16, k)
    losses.append(float(strategy.compute_loss(student, said, labels)[0]))
  assert losses[1] < 0.99 * losses[0]
  np.testing.assert_allclose(losses[2], losses[0], rtol=1e-4)


@pytest.mark.parametrize(
  ("options", "says"),
  [
    ({"temperature": 0.0}, "temperature"),
    ({"alpha": 1.5}, "alpha"),
    ({"distill_top_k": -1}, "distill_top_k"),
  ],
)
def test_nonsense_is_refused(options, says):
  with pytest.raises(ValueError, match=says):
    LogitStrategy(**options)


def test_configs_are_dataclasses_of_the_trainers():
  assert dataclasses.fields(TrainingInput)[-1].name == "teacher_output"
  assert TrainingConfig(max_steps=3).max_steps == 3
