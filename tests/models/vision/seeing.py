"""What a model of images and text must compute, see golden/make_vision_models.py."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.models import checkpoints
from tunix.models import families
from tunix.models.transformer import params
from tunix.ops.masks import next_token_targets, positions_from_mask
from tunix.ops.vocabulary.logprobs import weighted_nll
from tunix.utils import tree

TOLERANCE = 1e-5
# Tensors that transformers never trains.
BUFFERS = ("layer_scalar", "_min", "_max", "std_bias", "std_scale")


def arguments(want):
  return {
    "positions": positions_from_mask(jnp.asarray(want["mask"])),
    "attention_mask": checkpoints.visible(want["mask"]),
    "images": images(want),
  }


def images(want):
  if "images" in want:
    return want["images"]
  return want["values"], want["grid"]


def valid(logits, want):
  return np.asarray(logits) * want["mask"][..., None]


def loss_and_gradients(model, want):
  """The mean over next tokens that are no soft tokens, and its gradients by path."""
  graph, state = nnx.split(model)
  tokens, given = jnp.asarray(want["tokens"]), arguments(want)
  soft = model.config.soft_token
  weights = want["mask"][:, 1:] * want["mask"][:, :-1] * (want["tokens"][:, 1:] != soft)
  scored = jnp.pad(jnp.asarray(weights, jnp.float32), ((0, 0), (0, 1)))

  def loss(state):
    merged = nnx.merge(graph, state)
    hidden, _ = merged(tokens, **given, return_hidden=True)
    table, layout = merged.unembedding()
    targets = next_token_targets(jnp.where(tokens == soft, 0, tokens))
    total = weighted_nll(hidden, table, targets, scored, layout) / weights.sum()
    return total, merged.logits(hidden)

  run = jax.jit(jax.value_and_grad(loss, has_aux=True))
  (value, logits), gradients = run(state)
  return logits, value, tree.flatten(gradients)


def assert_equal(model, want):
  """Compares logits, loss and every gradient."""
  logits, value, gradients = loss_and_gradients(model, want)
  assert checkpoints.relative(valid(logits, want), want["logits"]) < TOLERANCE
  np.testing.assert_allclose(value, want["loss"], rtol=TOLERANCE)
  family = families.of_config(model.config)
  theirs = {
    family.canonical_key(key.removeprefix("grad/")): value
    for key, value in want.items()
    if key.startswith("grad/")
  }
  total = np.sqrt(sum(np.sum(np.square(x)) for x in theirs.values()))
  for path, gradient in gradients.items():
    place = params.place(family.names, path, model.config)
    for key, part in zip(place.keys, place.split(np.asarray(gradient))):
      if key.endswith(BUFFERS):
        assert key not in theirs
        continue
      size = max(np.linalg.norm(theirs[key]), 1e-3 * total)
      error = np.linalg.norm(part - theirs.pop(key)) / size
      assert error < TOLERANCE, (key, error)
  assert not theirs
