"""Llama 3 checkpoints: `config.json` and the family.

The tensor names are in the table `transformer.params.DECODER`.
"""

from __future__ import annotations

from typing import Any

from tunix.models.family import Family, presets_of
from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.hf import config as hf_config


def config_from_hf(hf: hf_config.HfConfig) -> ModelConfig:
  """Returns the `ModelConfig` of a `config.json` with model_type "llama".

  Raises:
    ValueError: see `hf_config.decoder_fields`.
  """
  return ModelConfig(**hf_config.decoder_fields(hf))


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """Returns the `config.json` of a Llama model."""
  hf = hf_config.write_decoder(config, "llama", "LlamaForCausalLM")
  return hf | {"mlp_bias": False}


FAMILY = Family(
  name="llama3",
  model_types=("llama",),
  config_class=ModelConfig,
  model_class=Llama3,
  config_from_hf=config_from_hf,
  config_to_hf=config_to_hf,
  presets=presets_of(ModelConfig),
)
