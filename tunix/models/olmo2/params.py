"""OLMo 2 checkpoints: `config.json` and the family.

The tensor names are in the table `transformer.params.DECODER`.
"""

from __future__ import annotations

from typing import Any

from tunix.models.family import Family, presets_of
from tunix.models.olmo2.model import ModelConfig, Olmo2
from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.hf import config as hf_config


def config_from_hf(hf: hf_config.HfConfig) -> ModelConfig:
  """Returns the `ModelConfig` of a `config.json` with model_type "olmo2".

  Raises:
    ValueError: see `hf_config.decoder_fields`.
  """
  return ModelConfig(**hf_config.decoder_fields({"rms_norm_eps": 1e-5} | dict(hf)))


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """Returns the `config.json` of an OLMo 2 model."""
  return hf_config.write_decoder(config, "olmo2", "Olmo2ForCausalLM")


FAMILY = Family(
  name="olmo2",
  model_types=("olmo2",),
  config_class=ModelConfig,
  model_class=Olmo2,
  config_from_hf=config_from_hf,
  config_to_hf=config_to_hf,
  presets=presets_of(ModelConfig),
  # These names have a date before the size.
  hub_names={
    "olmo-2-0425-1b": "olmo2_1b",
    "olmo-2-1124-7b": "olmo2_7b",
    "olmo-2-1124-13b": "olmo2_13b",
    "olmo-2-0325-32b": "olmo2_32b",
  },
)
