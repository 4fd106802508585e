"""Qwen3-VL: the configuration, the class and the family; the text model is a Qwen 3."""

from __future__ import annotations

import dataclasses
from typing import Any

from tunix.models.qwen3 import model as qwen3, params as text_params
from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.hf import config as hf_config
from tunix.models.vision import params as tower_params, qwen_params
from tunix.models.vision.qwen import QwenImages, QwenImagesConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(qwen3.ModelConfig, QwenImagesConfig):
  """Configuration of a Qwen3-VL; see `QwenImagesConfig`."""

  image_token_id: int = 151_655
  mrope_sections: tuple[int, int, int] = (24, 20, 20)


class Qwen3VL(qwen3.Qwen3, QwenImages):
  """A Qwen 3 model with images; see `QwenImages`."""

  config: ModelConfig


# transformers' values of absent fields.
_TEXT_DEFAULTS = {"num_key_value_heads": 32, "rope_theta": 500_000.0}


def _read_text(hf: hf_config.HfConfig) -> qwen3.ModelConfig:
  text = tower_params.text_section(hf, tied=False)
  hf_config.check_supported(text, {"model_type": ("qwen3_vl_text",)}, "text_config.")
  return text_params.config_from_hf(_TEXT_DEFAULTS | text | {"model_type": "qwen3"})


def _write_text(config: TransformerConfig) -> dict[str, Any]:
  return hf_config.write_decoder(config, "qwen3_vl_text", "Qwen3VLForCausalLM")


FAMILY = tower_params.with_text_only(
  text_params.FAMILY,
  qwen_params.family(
    dataclasses.replace(
      text_params.FAMILY, config_from_hf=_read_text, config_to_hf=_write_text
    ),
    "qwen3_vl",
    "qwen3_vl",
    "Qwen3VL",
    ModelConfig,
    Qwen3VL,
    deepstack=(8, 16, 24),
  ),
  {qwen_params.TEXT: "model."},
  r"model\.visual\..*",
)
