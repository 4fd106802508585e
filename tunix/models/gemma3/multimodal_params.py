"""Gemma 3 with images in Hugging Face's words."""

from __future__ import annotations

import re
from typing import Any

from tunix.models.gemma3 import params as text_params, vision_params
from tunix.models.gemma3.multimodal import MultimodalConfig
from tunix.models.transformer import hf_config, params
from tunix.models.transformer.config import TransformerConfig

NAMES: params.NameTable = {
  **vision_params.VISION,
  **vision_params.nested_text(text_params.NAMES),
  "score.kernel": text_params.NAMES["score.kernel"],
}
HARMLESS = (
  *vision_params.HARMLESS_VISION,
  *(re.escape("language_model.") + pattern for pattern in params.HARMLESS),
)
canonical_key = vision_params.canonical_key

# What an absent field of text_config means (transformers' Gemma3TextConfig).
_TEXT_DEFAULTS = {
  "vocab_size": 262_208,
  "hidden_size": 2304,
  "intermediate_size": 9216,
  "num_hidden_layers": 26,
  "num_attention_heads": 8,
  "num_key_value_heads": 4,
  "head_dim": 256,
  "sliding_window": 4096,
  "max_position_embeddings": 131_072,
}


def config_from_hf(hf: hf_config.HfConfig) -> MultimodalConfig:
  """`MultimodalConfig` of a `config.json` with model_type "gemma3".

  Raises:
    ValueError: see `hf_config.decoder_fields` and `vision_params`.
  """
  text = text_params.fields_from_hf(_TEXT_DEFAULTS | vision_params.text_config(hf))
  text["vision"] = vision_params.vision_config_from_hf(hf)
  text["num_scores"] = hf_config.read_scores(hf)
  text["image_tokens"] = vision_params.image_tokens_from_hf(hf)
  return MultimodalConfig(**text)


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """The `config.json` of a Gemma 3 with images."""
  assert isinstance(config, MultimodalConfig)
  text = text_params.config_to_hf(config)
  scores = hf_config.write_scores(config, "Gemma3ForCausalLM")
  hf = vision_params.config_to_hf(config.vision, config.image_tokens, text)
  return hf if config.num_scores is None else hf | scores
