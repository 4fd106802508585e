"""Adapters on vision towers and projectors: their names, files and merged weights."""

import functools
import re

import jax
import numpy as np
import pytest
from flax import nnx

from tests import toys_images
from tunix.data.images import ImageReader
from tunix.data.turns.trained_spans import Segment
from tunix.models import families, lora
from tunix.models.adapters import lora_modules
from tunix.models.files import tensor_files


@pytest.fixture(scope="module", params=toys_images.NAMES)
def toy(request, tmp_path_factory):
  """A folder, its model with random adapters, and the arguments of a call."""
  folder = toys_images.folder(request.param, tmp_path_factory.mktemp("x") / "model")
  model = toys_images.load(folder)
  targets = ("q_proj", *toys_images.adapted_modules(model))
  adapted = lora.apply(model, lora.LoraConfig(rank=2, targets=targets))
  for number, linear in enumerate(lora_modules.adapted(adapted).values()):
    b = jax.random.normal(jax.random.key(number), linear.lora_b.shape) / 8
    linear.lora_b.set_value(b)
  return folder, model, adapted, arguments(folder, model, request.param)


def arguments(folder, model, name):
  reader = ImageReader(folder, model.config)
  levels = np.random.default_rng(1).integers(0, 256, (20, 40, 3), np.uint8)
  pictures = reader.open([levels], None, "a test")
  text = Segment(f"look {reader.processor.PLACEHOLDER} at", False)
  [segment] = reader.expand(pictures, [text])
  tokens = np.asarray([toys_images.tokenizer(name).encode(segment.text)])
  pixels = reader.prompt(pictures).pixels
  return tokens, jax.tree.map(lambda x: x[None], pixels)


def logits(model, arguments):
  return np.asarray(call(*nnx.split(model), *arguments))


@functools.partial(jax.jit, static_argnums=0)
def call(graph, state, tokens, images):
  return nnx.merge(graph, state)(tokens, images=images)[0]


def test_files_hold_the_adapters_of_all_modules(toy, tmp_path):
  folder, model, adapted, given = toy
  want = logits(adapted, given)
  assert np.abs(want - logits(model, given)).max() > 1e-3
  lora.save_adapter(adapted, tmp_path / "adapter")
  loaded = lora.load_adapter(model, tmp_path / "adapter")
  np.testing.assert_array_equal(logits(loaded, given), want)
  assert set(lora_modules.adapted(loaded)) == set(lora_modules.adapted(adapted))
  np.testing.assert_allclose(logits(lora.merge(adapted), given), want, atol=2e-5)
  # Every adapter has the name and the sizes of a matrix of the base model.
  [weights] = folder.glob("*.safetensors")
  base = tensor_files.read_header(weights)
  peft = tensor_files.read_json(tmp_path / "adapter/adapter_config.json")
  header = tensor_files.read_header(tmp_path / "adapter/adapter_model.safetensors")
  rows, columns, family = set(), set(), families.of_config(model.config)
  for name, tensor in header.items():
    module, side = re.fullmatch(
      r"base_model\.model\.(.*)\.lora_([AB])\.weight", name
    ).groups()
    shape = base[family.canonical_key(f"{module}.weight")].shape
    assert module == family.module_key(family.canonical_key(module + "."))[:-1]
    assert tensor.shape == ((2, shape[1]) if side == "A" else (shape[0], 2)), name
    (rows if side == "A" else columns).add(module)
  assert rows == columns == set(peft["target_modules"])


def test_last_parts_of_names_do_not_mean_the_tower(toy):
  _, model, _, _ = toy
  for targets in (("q_proj",), lora.ALL_LINEAR, ("all-linear",)):
    paths = lora.match(model, targets)
    assert paths and all(path.startswith("layers.") for path in paths)
  towers = lora.match(model, ("vision_tower",))
  assert towers and all(path.startswith("vision_tower.layers.") for path in towers)
  assert lora.match(model, (towers[0], r"vision_tower\..*")) == towers
  config = lora.LoraConfig(rank=2, targets=("all-linear", "vision_tower"))
  kept = lora.config_of(lora.apply(model, config))
  assert lora.match(model, kept.targets) == lora.match(model, config.targets)
  with pytest.raises(ValueError, match="'embed_tokens': embed_tokens cannot be"):
    lora.match(model, ("embed_tokens",))


@pytest.mark.parametrize("toy", ["smolvlm"], indirect=True)
def test_an_engine_refuses_to_load_adapters_of_the_tower(toy, tmp_path):
  from tunix.generate.engine.config import EngineConfig
  from tunix.generate.engine.engine import Engine

  _, model, adapted, _ = toy
  config = EngineConfig(slots=2, max_tokens=64, adapter_ranks=4)
  engine = Engine(model, toys_images.tokenizer("smolvlm"), config)
  lora.save_adapter(adapted, tmp_path / "adapter")
  for source in (tmp_path / "adapter", adapted):
    with pytest.raises(ValueError, match=r"(projection|projector)\.proj"):
      engine.load_adapter("a", source)
