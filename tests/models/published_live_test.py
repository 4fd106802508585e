"""Presets as `transformers` counts them, and sizes that are its defaults.

Runs where the `parity` extra is installed; arrays have shapes only.
"""

import dataclasses

import pytest

from tests.models.published import COUNTS
from tunix.models import families
from tunix.models.transformer.config import TransformerConfig

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# Presets whose sizes a configuration of transformers has by default, with the fields in
# which the default differs from the published file: mostly those of longer rows.
DEFAULTS = {
  "deepseek_v3_671b": ("DeepseekV3Config", {"max_position", "query_scale", "rope"}),
  "glm4p7_flash": ("Glm4MoeLiteConfig", {"rope"}),
  "gpt_oss_120b": ("GptOssConfig", set()),
  "ministral3_8b": ("Ministral3Config", set()),
  "olmo3_7b": ("Olmo3Config", {"max_position", "norm_eps", "rope", "vocab_size"}),
  "qwen3p5_35b_a3b": ("Qwen3_5MoeTextConfig", {"max_position", "rope"}),
  "qwen3p5_9b": ("Qwen3_5TextConfig", {"max_position", "rope"}),
  "smollm3_3b": ("SmolLM3Config", {"max_position", "rope"}),
}


@pytest.mark.parametrize("preset", COUNTS)
def test_transformers_counts_as_many_parameters(preset):
  family, make = families.preset(preset)
  config = transformers.AutoConfig.for_model(**family.config_to_hf(make()))
  with torch.device("meta"):
    model = transformers.AutoModelForCausalLM.from_config(config)
  # Ours include what transformers keeps as buffers: corrections of routers, scalars of
  # layers. Tied tables are one parameter in both.
  saved = model.state_dict().keys()
  found = [x for name, x in model.named_buffers() if name in saved]
  found += model.parameters()
  assert sum(x.numel() for x in found) == COUNTS[preset][1]


@pytest.mark.parametrize("preset", DEFAULTS)
def test_sizes_are_the_defaults_of_transformers(preset):
  name, other = DEFAULTS[preset]
  family, make = families.preset(preset)
  default = family.config_from_hf(getattr(transformers, name)().to_dict())
  assert different(default, make()) == other


def different(one: TransformerConfig, two: TransformerConfig) -> set[str]:
  names = [field.name for field in dataclasses.fields(two)]
  return {name for name in names if getattr(one, name) != getattr(two, name)}


def test_the_layers_of_gemma_4_have_numbers_of_two_digits():
  # transformers writes "05" beside "11".
  family = families.FAMILIES["gemma4"]
  theirs = transformers.Gemma4TextConfig().to_dict()
  assert "05" in theirs["per_layer_config"]
  assert family.config_from_hf(theirs).num_layers == 30
