"""Checkpoints of Gemma 3 with images: `config.json`, tensor names and the family."""

from __future__ import annotations

import re
from typing import Any

from tunix.models.family import Family, presets_of
from tunix.models.gemma3 import params as text_params, vision_params
from tunix.models.gemma3.multimodal import MultimodalConfig, MultimodalGemma3
from tunix.models.transformer import params
from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.hf import config as hf_config
from tunix.models.vision import params as tower_params

NAMES: params.NameTable = {
  **vision_params.VISION,
  **vision_params.nested_text(params.DECODER),
  "score.kernel": params.DECODER["score.kernel"],
}
HARMLESS = (
  *vision_params.HARMLESS_VISION,
  *(re.escape("language_model.") + pattern for pattern in params.HARMLESS),
)

# Values of absent fields of text_config, those of transformers' Gemma3TextConfig.
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
  """Returns the `MultimodalConfig` of a `config.json` with model_type "gemma3".

  Raises:
    ValueError: see `hf_config.decoder_fields` and `vision_params`.
  """
  text = text_params.fields_from_hf(_TEXT_DEFAULTS | vision_params.text_config(hf))
  text["vision"] = vision_params.vision_config_from_hf(hf)
  text["num_scores"] = hf_config.read_scores(hf)
  text["image_tokens"] = vision_params.image_tokens_from_hf(hf)
  return MultimodalConfig(**text)


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """Returns the `config.json` of a Gemma 3 with images."""
  assert isinstance(config, MultimodalConfig)
  text = text_params.config_to_hf(config)
  scores = hf_config.write_scores(config, "Gemma3ForCausalLM")
  hf = vision_params.config_to_hf(config.vision, config.image_tokens, text)
  return hf if config.num_scores is None else hf | scores


FAMILY = tower_params.with_text_only(
  text_params.FAMILY,
  Family(
    name="gemma3_multimodal",
    model_types=("gemma3",),
    config_class=MultimodalConfig,
    model_class=MultimodalGemma3,
    names=NAMES,
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    harmless=HARMLESS,
    presets={
      name: make
      for name, make in presets_of(MultimodalConfig).items()
      if name not in text_params.FAMILY.presets
    },
    canonical_key=vision_params.canonical_key,
    module_key=vision_params.module_key,
  ),
  {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head": "lm_head",
  },
  r"(model\.)?(vision_tower|multi_modal_projector)\..*",
)
