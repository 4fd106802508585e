"""The projection: shapes, where it begins, and that it comes off."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tunix.distillation.feature_extraction import (
  ModelWithFeatureProjection,
  remove_feature_projection_from_models,
  setup_models_with_feature_projection,
)
from tunix.models.transformer.decoder_layer import DecoderLayer


def projection(own, target, **options):
  model = toys.model(**options)
  return ModelWithFeatureProjection(model, own, target, rngs=nnx.Rngs(0))


def test_width_by_hand():
  made = projection((2, 2, 3, 4), (2, 2, 3, 6))
  assert made.mixture is None
  x = jnp.arange(48.0).reshape(2, 2, 3, 4)
  want = np.einsum("bltd,de->blte", x, made.projection[...])
  np.testing.assert_allclose(made.project(x), want, rtol=1e-5)


def test_layers_begin_at_the_same_depth():
  """2 layers to 4: the teacher's first two from the first, its last two from the
  second; 4 to 2: from the second and the fourth."""
  made = projection((2, 2, 3, 4), (2, 4, 3, 4))
  made.projection.set_value(jnp.eye(4))
  x = jnp.arange(48.0).reshape(2, 2, 3, 4)
  np.testing.assert_allclose(made.project(x), x[:, [0, 0, 1, 1]])
  made = projection((2, 4, 3, 2), (2, 2, 3, 2))
  made.projection.set_value(jnp.eye(2))
  x = x.reshape(2, 4, 3, 2)
  np.testing.assert_allclose(made.project(x), x[:, [1, 3]])


def test_it_is_trained_with_adapters_too():
  kinds = [
    type(projection((2, 2, 3, 4), (2, 3, 3, 6), lora_rank=rank).projection)
    for rank in (0, 2)
  ]
  assert kinds == [nnx.Param, nnx.LoRAParam]


def test_other_dimensions_may_not_differ():
  with pytest.raises(ValueError, match="width"):
    projection((2, 2, 3, 4), (2, 2, 5, 4))


def test_models_are_set_up_and_put_back():
  student = toys.model().unstack()
  known = toys.model(1, num_layers=3, embed_dim=48).unstack()
  graphs = nnx.graphdef(student), nnx.graphdef(known)
  tokens = jnp.zeros((2, 5), jnp.int32)
  wrapped, taught = setup_models_with_feature_projection(
    student,
    known,
    DecoderLayer,
    DecoderLayer,
    tokens,
    {"input_tokens": tokens},
    rngs=nnx.Rngs(0),
  )
  (logits, _), features = wrapped(tokens)
  assert logits.shape == (2, 5, toys.VOCAB)
  assert features.shape == (2, 3, 5, 48)
  assert taught is known
  back = remove_feature_projection_from_models(wrapped, taught)
  assert back == (student, known)
  assert (nnx.graphdef(student), nnx.graphdef(known)) == graphs
