"""Llama 3 in Hugging Face's words."""

from __future__ import annotations

from typing import Any

from tunix.models.llama3.model import ModelConfig
from tunix.models.transformer import hf_config, params
from tunix.models.transformer.config import TransformerConfig

NAMES: params.NameTable = params.DECODER


def config_from_hf(hf: hf_config.HfConfig) -> ModelConfig:
  """`ModelConfig` of a `config.json` with model_type "llama".

  Raises:
    ValueError: see `hf_config.decoder_fields`.
  """
  return ModelConfig(**hf_config.decoder_fields(hf))


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """The `config.json` of a Llama model."""
  hf = hf_config.write_decoder(config, "llama", "LlamaForCausalLM")
  return hf | {"mlp_bias": False}
