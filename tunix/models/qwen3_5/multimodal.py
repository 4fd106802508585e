"""Qwen3.5 with images: the configuration, the class and the family."""

from __future__ import annotations

import dataclasses

from tunix.models.qwen3_5 import params
from tunix.models.qwen3_5.model import ModelConfig, Qwen3p5
from tunix.models.vision import qwen_params
from tunix.models.vision.qwen import QwenImages, QwenImagesConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultimodalConfig(ModelConfig, QwenImagesConfig):
  """`ModelConfig` of a Qwen3.5 with images; see `QwenImagesConfig`."""


class MultimodalQwen3p5(Qwen3p5, QwenImages):
  """A Qwen3.5 model with images; see `QwenImages`."""

  config: MultimodalConfig


FAMILY = qwen_params.family(
  params.FAMILY,
  "qwen3_5_multimodal",
  "qwen3_5",
  "Qwen3_5",
  MultimodalConfig,
  MultimodalQwen3p5,
)
