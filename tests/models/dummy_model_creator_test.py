import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import toys
from tunix.models.dummy_model_creator import create_dummy_model
from tunix.models.transformer.model import Transformer
from tunix.utils import tree


def leaves(model):
  return tree.flatten(nnx.state(model))


def test_weights_are_draws_of_the_seed(mesh_fsdp4_tp2):
  config = toys.config()
  model = create_dummy_model(Transformer, config, scale=0.5)
  values = leaves(model)
  for path, value in values.items():
    assert abs(float(jnp.std(value)) - 0.5) < 0.2, path
  placed = leaves(create_dummy_model(Transformer, config, mesh_fsdp4_tp2, scale=0.5))
  other = leaves(create_dummy_model(Transformer, config, random_seed=1, scale=0.5))
  for path, value in values.items():
    np.testing.assert_allclose(placed[path], value, rtol=1e-6, err_msg=path)
    assert np.abs(other[path] - value).max() > 0.01
  assert placed["layers.attn.q_proj.kernel"].sharding.num_devices == 8
  assert not placed["layers.attn.q_proj.kernel"].is_fully_replicated
  assert model(np.ones((1, 4), np.int32))[0].shape == (1, 4, config.vocab_size)


def test_dtype_and_other_classes():
  model = create_dummy_model(Transformer, toys.config(), dtype=jnp.bfloat16)
  assert {str(x.dtype) for x in leaves(model).values()} == {"bfloat16"}

  class Noisy(nnx.Module):
    def __init__(self, config, *, rngs):
      self.linear = nnx.Linear(2, 3, rngs=rngs)
      self.dropout = nnx.Dropout(config, rngs=rngs)
      self.count = nnx.Variable(jnp.zeros((), jnp.int32))

  noisy = create_dummy_model(Noisy, 0.5)
  out = noisy.dropout(jnp.ones(100))
  assert 20 < float((out == 0).sum()) < 80

  class Strange(nnx.Module):
    def __init__(self, config, *, rngs):
      self.flag = nnx.Variable(jnp.zeros((), bool))

  with pytest.raises(ValueError, match="dtype bool cannot be drawn"):
    create_dummy_model(Strange, None)
