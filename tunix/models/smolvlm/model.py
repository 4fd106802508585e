"""SmolVLM2 (Marafioti et al. 2025, arXiv:2504.05299): SigLIP, pixel shuffle, Llama."""

from __future__ import annotations

import dataclasses
import math

import jax
from flax import nnx
from jaxtyping import Array, Float

from tunix.models.llama3 import model as llama3
from tunix.models.transformer.layer_maker import LayerMaker
from tunix.models.vision.config import TowerConfig, VisionLanguageConfig, in_model
from tunix.models.vision.model import VisionLanguageModel
from tunix.models.vision.siglip import SiglipConfig, SiglipTower
from tunix.utils import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(llama3.ModelConfig, VisionLanguageConfig):
  """Configuration of a SmolVLM2, a SmolVLM or an Idefics3.

  Attributes:
    vision: see `VisionLanguageConfig`.
    shuffle: edge of the square of patches that makes one soft token; it must divide the
      patches of an image's edge.
    image_token_id: id of the soft tokens.
  """

  vision: SiglipConfig
  shuffle: int = 2
  image_token_id: int = 128_257

  def __post_init__(self):
    super().__post_init__()
    checks.fields(self, shuffle=checks.COUNT, image_token_id=checks.NOT_NEGATIVE)
    if self.vision.grid % self.shuffle:
      raise ValueError(
        f"shuffle is {self.shuffle} (scale_factor); expected a divisor of "
        f"{self.vision.grid}, the patches of an image's edge"
      )

  @property
  def soft_token(self) -> int:
    """See `VisionLanguageConfig`."""
    return self.image_token_id

  @property
  def image_sizes(self) -> tuple[int, int]:
    """See `VisionLanguageConfig`."""
    return self.vision.image_size, self.tokens_per_image

  @property
  def tokens_per_image(self) -> int:
    """Soft tokens of an image, or of a tile."""
    return (self.vision.grid // self.shuffle) ** 2


class Connector(nnx.Module):
  """Projector of squares of patches to soft tokens.

  Attributes:
    proj: linear map from the s^2 patches of a square, [s^2 Dv, D].
  """

  def __init__(
    self, config: TowerConfig, shuffle: int, text_dim: int, *, rngs: nnx.Rngs
  ):
    make = LayerMaker(config.sharding, config.param_dtype, rngs)
    self.proj = make.linear(shuffle**2 * config.embed_dim, text_dim, "in_out")
    self.shuffle = shuffle

  def __call__(self, patches: Float[Array, "n P Dv"]) -> Float[Array, "n S D"]:
    """Joins the patches of each square, row by row, and projects them.

    Shi et al. 2016, arXiv:1609.05158, call the inverse a pixel shuffle.
    """
    n, count, dim = patches.shape
    s = self.shuffle
    edge = math.isqrt(count) // s
    with jax.named_scope("projector"):
      x = patches.reshape(n, edge, s, edge, s, dim).swapaxes(2, 3)
      return self.proj(x.reshape(n, edge**2, s * s * dim))


class SmolVLM(VisionLanguageModel):
  """A Llama that reads images; see `VisionLanguageModel`."""

  config: ModelConfig

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    tower = in_model(config.vision, config)
    self.vision_tower = SiglipTower(tower, rngs=rngs)
    self.multi_modal_projector = Connector(
      tower, config.shuffle, config.embed_dim, rngs=rngs
    )
