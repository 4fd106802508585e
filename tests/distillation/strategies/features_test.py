"""Feature and attention strategies: the loss by hand, padding, options, learning."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tests.distillation import trainers
from tests.sft import trainers as sft
from tunix.distillation.feature_extraction.projection import ModelWithFeatureProjection
from tunix.distillation.outputs import Labels
from tunix.distillation.strategies import (
  AttentionProjectionStrategy,
  AttentionTransferStrategy,
  FeaturePoolingStrategy,
  FeatureProjectionStrategy,
)
from tunix.models.transformer.attention.layer import Attention
from tunix.models.transformer.decoder_layer import DecoderLayer

MAKES = {
  "pooling": lambda **o: FeaturePoolingStrategy(feature_layer=DecoderLayer, **o),
  "projection": lambda **o: FeatureProjectionStrategy(feature_layer=DecoderLayer, **o),
  "transfer": lambda **o: AttentionTransferStrategy(attention_layer=Attention, **o),
  "attention": lambda **o: AttentionProjectionStrategy(attention_layer=Attention, **o),
}


def test_cosine_distance_by_hand():
  """Two layers, three positions, the last of which is padding."""
  strategy = FeaturePoolingStrategy(feature_layer=nnx.Linear, alpha=0.75)
  student = jnp.asarray([[[[1.0, 0], [1, 0], [9, 9]], [[1.0, 0], [0, 2], [9, 9]]]])
  known = jnp.asarray([[[[1.0, 0], [0, 1], [-9, 0]], [[-1.0, 0], [0, 1], [-9, 0]]]])
  # 1 - cos: position 0 has 0 and 2, position 1 has 1 and 0: mean (1 + 1/2) / 2.
  logits = jnp.zeros((1, 3, 4))
  labels = Labels(jnp.zeros((1, 3), jnp.int32), jnp.asarray([[1.0, 1.0, 0.0]]))
  said = {"logits": logits, "features": student}
  loss, metrics = strategy.compute_loss(said, known, labels)
  np.testing.assert_allclose(metrics["distill/feature_loss"], 0.75, rtol=1e-5)
  np.testing.assert_allclose(metrics["distill/hard_loss"], np.log(4), rtol=1e-5)
  np.testing.assert_allclose(loss, 0.75 * 0.75 + 0.25 * np.log(4), rtol=1e-5)
  value, aux = strategy.compute_eval_loss(said, labels)
  np.testing.assert_allclose(value, np.log(4), rtol=1e-5)
  assert not aux


def test_the_teacher_is_pooled_to_the_student():
  strategy = FeaturePoolingStrategy(
    feature_layer=nnx.Linear, alpha=1.0, feature_loss_fn=lambda s, t: (s - t) ** 2
  )
  known = jnp.arange(8.0).reshape(1, 2, 1, 4)  # to one layer and two numbers
  said = {"logits": jnp.zeros((1, 1, 4)), "features": jnp.zeros((1, 1, 1, 2))}
  labels = Labels(jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1)))
  loss, _ = strategy.compute_loss(said, known, labels)
  np.testing.assert_allclose(loss, (2.5**2 + 4.5**2) / 2)


@pytest.mark.parametrize("name", MAKES)
def test_features_come_nearer(name):
  student = toys.model()
  # A fresh model's attention puts out numbers of 0.01: larger steps would jump over.
  rate = 1e-3 if name == "attention" else 1e-2
  known = trainers.teacher(num_layers=3)
  t = trainers.trainer(MAKES[name](alpha=1.0), student=student, known=known, rate=rate)
  t.train([toys.batch(0)] * 6, [toys.batch(1)])
  distances = sft.history(t, "distill/feature_loss")
  assert distances[-1] < 0.9 * distances[0]
  wrapped = isinstance(t.model, ModelWithFeatureProjection)
  assert wrapped == (name in ("projection", "attention"))
  t.close()
  assert t.model is student
  assert sft.leaves(student).keys() == sft.leaves(toys.model()).keys()


def test_no_logits_are_built():
  """Blocks of logits are of 256 MiB at most; this batch's would be twice that."""
  vocab, rows, length = 2**15, 32, 128
  t = trainers.trainer(
    MAKES["pooling"](),
    student=trainers.fresh_student(vocab_size=vocab),
    known=trainers.teacher(vocab_size=vocab),
  )
  batch = toys.batch(0, rows=rows, length=length, vocab=vocab)
  text = t.lower_train_step(batch).as_text()
  assert f"<{rows * length // 2}x{vocab}x" in text
  for whole in (f"<{rows}x{length}x{vocab}x", f"<{rows * length}x{vocab}x"):
    assert whole not in text


def losses(name, student=None, **options):
  t = trainers.trainer(MAKES[name](**options), student=student)
  t.train([toys.batch(0)])
  return sft.history(t, "loss")[0]


@pytest.mark.parametrize(
  ("name", "changes"),
  [
    ("pooling", {"alpha": 0.5}),
    ("pooling", {"cosine_distance_axis": -2}),
    ("pooling", {"feature_loss_fn": lambda s, t: jnp.abs(s - t)}),
    ("transfer", {"attention_loss_fn": lambda s, t: jnp.mean(jnp.abs(s - t))}),
    ("projection", {"rngs": nnx.Rngs(5)}),
    ("attention", {"attention_loss_fn": lambda s, t: jnp.abs(s - t)}),
  ],
)
def test_options_change_the_loss(name, changes):
  assert losses(name) != losses(name, **changes)


def test_the_projection_of_adapters_is_trained():
  t = trainers.trainer(MAKES["projection"](), student=toys.model(lora_rank=2))
  before = sft.leaves(t.model, nnx.LoRAParam)
  t.train([toys.batch(0)])
  after = sft.leaves(t.model, nnx.LoRAParam)
  assert np.any(before["projection"] != after["projection"])
  frozen = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))
  assert "model.lm_head.kernel" in sft.leaves(t.model, frozen)


def test_dummy_input_of_the_users_functions():
  """A model of vectors: labels are one-hot by row, features [B, D]."""

  class Net(nnx.Module):
    def __init__(self, width, seed):
      rngs = nnx.Rngs(seed)
      self.body = nnx.Linear(6, width, rngs=rngs)
      self.head = nnx.Conv(width, 3, (1,), rngs=rngs)

    def __call__(self, x):
      return self.head(jnp.tanh(self.body(x)))

  forward = lambda model, x: model(x)
  labels = lambda x, y: jax.nn.one_hot(y, 3)
  strategy = FeatureProjectionStrategy(
    forward, forward, labels, nnx.Linear, jnp.zeros((1, 6)), nnx.Rngs(0)
  )
  t = trainers.trainer(strategy, student=Net(4, 0), known=Net(8, 1))
  rng = np.random.default_rng(0)
  batch = {
    "x": rng.standard_normal((5, 6)).astype(np.float32),
    "y": rng.integers(0, 3, 5),
  }
  t.train([batch] * 5)
  found = sft.history(t, "loss")
  assert found[-1] < found[0]


def test_what_is_refused():
  with pytest.raises(TypeError, match="layer to capture"):
    FeaturePoolingStrategy()
  with pytest.raises(ValueError, match="alpha"):
    MAKES["pooling"](alpha=-0.1)
  with pytest.raises(ValueError, match="may grow"):
    trainers.trainer(MAKES["pooling"](), known=trainers.teacher(embed_dim=16)).train(
      [toys.batch(0)]
    )


def test_dropout_masks_go_on_from_step_to_step():
  from tunix.models import lora

  config = lora.LoraConfig(rank=2, alpha=4.0, dropout=0.5)
  student: Any = toys.model()
  t = trainers.trainer(MAKES["pooling"](), student=lora.apply(student, config))
  rows = lambda: {
    int(x[..., 1].max())
    for n, x in sft.leaves(t.model, nnx.RngState).items()
    if "lora_rng" in n
  }
  t.train([toys.batch(0)])
  first = rows()
  assert first == {8}
  t.train([toys.batch(0)])
  assert rows() == {16}
