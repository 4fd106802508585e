"""A vision tower and projector filled from a checkpoint's tensors."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.models import checkpoints
from tunix.models.gemma3 import vision_params
from tunix.models.gemma3.vision import Projector, VisionTower
from tunix.models.transformer import params
from tunix.utils import tree

GOLDEN = checkpoints.GOLDEN / "gemma3_vision"


class Sight(nnx.Module):
  """The two parts under the names that a whole model gives them."""

  def __init__(self, config, text_dim, *, rngs):
    self.config = config
    self.vision_tower = VisionTower(config, rngs=rngs)
    self.multi_modal_projector = Projector(config, text_dim, rngs=rngs)

  def __call__(self, pixels):
    return self.multi_modal_projector(self.vision_tower(pixels))


def golden_config(**options):
  hf = json.loads((GOLDEN / "config.json").read_text())
  return vision_params.vision_config_from_hf(hf, **options)


def golden_tensors():
  tensors = checkpoints.tensors(GOLDEN)
  return {k: v.astype(np.float32) for k, v in tensors.items()}


def golden_pixels(expected):
  return expected["images"].astype(np.float32) / np.float32(127.5) - 1


def build(config, text_dim, tensors):
  """Filled by the name table; every tensor of the vision side is used."""
  model = Sight(config, text_dim, rngs=nnx.Rngs(0))
  graph, state = nnx.split(model)
  left = {k for k in tensors if not k.startswith("language_model.")}

  def load(path, leaf):
    place = params.place(vision_params.VISION, tree.path_name(path), config)
    values = []
    for key in place.keys:
      left.remove(key)
      value = tensors[key]
      assert value.shape == place.tensor_shape(leaf.shape), key
      values.append(value.T if place.transpose else value)
    value = np.stack(values) if place.lead else values[0]
    return jnp.asarray(value, leaf.dtype)

  state = jax.tree_util.tree_map_with_path(load, state)
  assert not left
  return nnx.merge(graph, state)


def as_checkpoint(state, config):
  """Arrays shaped like the weights, for example gradients, by tensor name."""
  out = {}
  for path, value in tree.flatten(state).items():
    place = params.place(vision_params.VISION, path, config)
    values = value if place.lead else [value]
    for key, one in zip(place.keys, values):
      out[key] = np.asarray(one.T if place.transpose else one)
  return out


def gradients(model, pixels, cotangent):
  """Of sum(features * cotangent), by tensor name."""
  graph, state = nnx.split(model)

  def loss(state):
    return jnp.sum(nnx.merge(graph, state)(pixels) * cotangent)

  grads = jax.jit(jax.grad(loss))(state)
  return as_checkpoint(grads, model.config)


def assert_equal_gradients(got, want, tolerance=1e-3):
  """Norm of the difference over the norm, for each tensor.

  A bias of all keys shifts all scores of a query alike, so that its gradient is zero
  but for rounding; it is compared with the other gradients' size.
  """
  assert sorted(got) == sorted(want)
  typical = np.median([np.linalg.norm(v) for v in want.values()])
  for key, value in want.items():
    size = typical if key.endswith("k_proj.bias") else np.linalg.norm(value)
    assert np.linalg.norm(got[key] - value) <= tolerance * size, key
