"""Gemma 3 with images: the text model, the vision tower and the projector together."""

from __future__ import annotations

import dataclasses

from flax import nnx

from tunix.models.gemma3.image_tokens import ImageTokens
from tunix.models.gemma3.model import Gemma3, ModelConfig
from tunix.models.gemma3.vision import Projector, VisionConfig, VisionTower
from tunix.models.vision.config import VisionLanguageConfig, in_model
from tunix.models.vision.model import VisionLanguageModel

_VISION = VisionConfig()
_TOKENS = ImageTokens()


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultimodalConfig(ModelConfig, VisionLanguageConfig):
  """`ModelConfig` of a Gemma 3 with images, for the sizes from 4B.

  Attributes:
    vision: see `VisionLanguageConfig`.
    image_tokens: the token ids around an image.
  """

  vision: VisionConfig = _VISION
  image_tokens: ImageTokens = _TOKENS

  @property
  def soft_token(self) -> int:
    """See `VisionLanguageConfig`."""
    return self.image_tokens.soft

  @property
  def image_sizes(self) -> tuple[int, int]:
    """See `VisionLanguageConfig`."""
    return self.vision.image_size, self.vision.tokens_per_image


class MultimodalGemma3(Gemma3, VisionLanguageModel):
  """A Gemma 3 model with images; see `VisionLanguageModel`."""

  config: MultimodalConfig
  attends_within_images = True

  def __init__(self, config: MultimodalConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    tower = in_model(config.vision, config)
    self.vision_tower = VisionTower(tower, rngs=rngs)
    self.multi_modal_projector = Projector(tower, config.embed_dim, rngs=rngs)
