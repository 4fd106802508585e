"""Qwen3.5 mixtures with images: the configuration, the class and the family."""

from __future__ import annotations

import dataclasses

from tunix.models.qwen3_5_moe import params
from tunix.models.qwen3_5_moe.model import ModelConfig, Qwen3p5Moe
from tunix.models.vision import qwen_params
from tunix.models.vision.qwen import QwenImages, QwenImagesConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultimodalConfig(ModelConfig, QwenImagesConfig):
  """`ModelConfig` of a Qwen3.5 mixture with images; see `QwenImagesConfig`."""


class MultimodalQwen3p5Moe(Qwen3p5Moe, QwenImages):
  """A Qwen3.5 mixture with images; see `QwenImages`."""

  config: MultimodalConfig


FAMILY = qwen_params.family(
  params.FAMILY,
  "qwen3_5_moe_multimodal",
  "qwen3_5_moe",
  "Qwen3_5Moe",
  MultimodalConfig,
  MultimodalQwen3p5Moe,
)
