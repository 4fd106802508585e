"""OLMo 2 in Hugging Face's words."""

from __future__ import annotations

from typing import Any

from tunix.models.olmo2.model import ModelConfig
from tunix.models.transformer import hf_config, params
from tunix.models.transformer.config import TransformerConfig

NAMES: params.NameTable = params.DECODER


def config_from_hf(hf: hf_config.HfConfig) -> ModelConfig:
  """`ModelConfig` of a `config.json` with model_type "olmo2".

  Raises:
    ValueError: see `hf_config.decoder_fields`.
  """
  return ModelConfig(**hf_config.decoder_fields({"rms_norm_eps": 1e-5} | dict(hf)))


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """The `config.json` of an OLMo 2 model."""
  return hf_config.write_decoder(config, "olmo2", "Olmo2ForCausalLM")
