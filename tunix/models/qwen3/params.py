"""Qwen 3 in Hugging Face's words."""

from __future__ import annotations

from typing import Any

from tunix.models.qwen3.model import ModelConfig
from tunix.models.transformer import hf_config, params
from tunix.models.transformer.config import TransformerConfig

NAMES: params.NameTable = {**params.DECODER, **params.QK_NORM}


def config_from_hf(hf: hf_config.HfConfig) -> ModelConfig:
  """`ModelConfig` of a `config.json` with model_type "qwen3".

  Raises:
    ValueError: see `hf_config.decoder_fields`.
  """
  return ModelConfig(**hf_config.decoder_fields(hf, head_dim=128))


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """The `config.json` of a dense Qwen 3 model."""
  hf = hf_config.write_decoder(config, "qwen3", "Qwen3ForCausalLM")
  return hf | {"use_sliding_window": False, "sliding_window": None}
