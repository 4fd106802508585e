"""Models of images and text against what transformers computed.

The expected values are committed (tests/golden/make_vision_models.py).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import checkpoints
from tests.models.vision import seeing
from tunix.models import families
from tunix.models.automodel import AutoModel
from tunix.models.safetensors_saver import save_pretrained

NAMES = ("smolvlm", "ministral3")


def folder_of(name):
  return checkpoints.GOLDEN / f"{name}_vision"


@pytest.fixture(scope="module", params=NAMES)
def name(request):
  return request.param


@pytest.fixture(scope="module")
def want(name):
  return checkpoints.expected(f"{name}_vision")


def load(name, **options):
  return AutoModel.from_pretrained(
    folder_of(name), dtype=jnp.float32, images=True, **options
  )


def test_logits_loss_and_every_gradient(name, want):
  seeing.assert_equal(load(name), want)


def test_features_and_another_image(name, want):
  model = load(name, scan_layers=True)
  images = seeing.images(want)
  features = np.asarray(jax.jit(model.image_features)(images))
  features = features.reshape(-1, features.shape[-1])
  assert checkpoints.relative(features, want["features"]) < seeing.TOLERANCE


def test_there_and_back(name, tmp_path):
  model = load(name)
  save_pretrained(model, tmp_path / "out", source=folder_of(name))
  back = AutoModel.from_pretrained(tmp_path / "out", images=True)
  assert back.config == model.config
  original = checkpoints.tensors(folder_of(name))
  canonical = families.of_config(model.config).canonical_key
  original = {canonical(key): value for key, value in original.items()}
  saved = checkpoints.tensors(tmp_path / "out")
  assert sorted(saved) == sorted(original)
  for key, value in original.items():
    np.testing.assert_array_equal(saved[key], value.astype(np.float32), err_msg=key)


def test_text_alone(name, want, tmp_path):
  """The choice that leaves the tower out computes the same logits for texts."""
  seeing_model = load(name)
  model = AutoModel.from_pretrained(folder_of(name), dtype=jnp.float32, images=False)
  assert not hasattr(model, "vision_tower")
  tokens = want["tokens"][1:2, 5:]  # the row without images
  logits, _ = model(tokens)
  expected = want["logits"][1:2, 5:]
  assert checkpoints.relative(logits, expected) < seeing.TOLERANCE
  assert checkpoints.relative(seeing_model(tokens)[0], expected) < seeing.TOLERANCE
  save_pretrained(model, tmp_path / "out", source=folder_of(name))
  assert AutoModel.from_pretrained(tmp_path / "out").config == model.config
