"""What LoRA adapts where nobody names modules, of every preset, from shapes."""

import jax
import pytest
from flax import nnx

from tunix.cli import config as config_lib
from tunix.models import families, lora

# Maps to one number for each head or token, or to a layer's input, which get no adapter
# by default.
SMALL = (
  ".shared_gate",
  ".in_proj_a",
  ".in_proj_b",
  ".input_gate.gate",
  ".input_gate.projection",
)
PRESETS = {
  name: family for family in families.FAMILIES.values() for name in family.presets
}


def kernels(family, preset):
  """Paths of all matrices of a model's layers, by its parameters alone."""
  config = family.presets[preset]()
  model = nnx.eval_shape(lambda: family.model_class(config, rngs=nnx.Rngs(0)))
  flat = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(nnx.state(model)))[0]
  paths = {".".join(str(key.key) for key in path): leaf for path, leaf in flat}
  found = {
    path.rpartition(".")[0]
    for path, leaf in paths.items()
    if path.startswith("layers.") and path.endswith(".kernel") and len(leaf.shape) > 2
  }
  return model, found, config


@pytest.mark.parametrize("preset", PRESETS)
def test_all_linear_layers_and_nothing_else_are_adapted(preset):
  model, found, config = kernels(PRESETS[preset], preset)
  chosen = lora.match(model, lora.LoraConfig(rank=1).targets)
  router = {path for path in found if path.endswith(".router")}
  assert bool(router) == (config.moe is not None)
  small = {path for path in found if path.endswith(SMALL)}
  if preset.startswith("nemotron"):  # PEFT refuses these of Mamba-2
    small |= {path for path in found if path.endswith(".out_proj")}
  assert set(chosen) == found - router - small


def test_the_words_that_ask_for_it():
  words = ["--lora.rank=2", "--lora.targets=all-linear"]
  assert config_lib.load(words).lora.targets == lora.ALL_LINEAR
