"""The vision tower of Gemma 3, and the projector into the text model's space.

The tower is SigLIP's encoder (see `vision.siglip`). Gemma 3 (arXiv:2503.19786) pools
its 64x64 patches to 16x16 soft tokens per image. The tokens that they replace are in
image_tokens.py, the names of the weights in vision_params.py.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from tunix.models.transformer.layer_maker import LayerMaker
from tunix.models.vision.layers import LayerNorm as LayerNorm, attend_all as attend_all
from tunix.models.vision.siglip import SiglipConfig, SiglipTower
from tunix.utils import checks

VisionTower = SiglipTower


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig(SiglipConfig):
  """`SiglipConfig` with Gemma 3's defaults (4B to 27B).

  `norm_eps` is also the epsilon of the projector's RMS norm.

  Attributes:
    tokens_per_image: soft tokens S per image, a square number whose root divides the
      number of patches along an edge.
  """

  num_layers: int = 27
  embed_dim: int = 1152
  hidden_dim: int = 4304
  num_heads: int = 16
  patch_size: int = 14
  image_size: int = 896
  tokens_per_image: int = 256

  def __post_init__(self):
    super().__post_init__()
    checks.fields(self, tokens_per_image=checks.COUNT)
    if self.pooled_grid**2 != self.tokens_per_image or self.grid % self.pooled_grid:
      raise ValueError(
        f"tokens_per_image is {self.tokens_per_image}, expected the square of a "
        f"divisor of {self.grid}, the patches of an image's edge"
      )

  @property
  def pooled_grid(self) -> int:
    """Soft tokens along an edge of the image."""
    return math.isqrt(self.tokens_per_image)


class Projector(nnx.Module):
  """Projector of patches to the soft tokens of an image in the text model.

  Attributes:
    mm_soft_emb_norm: RMS norm over Dv that multiplies by 1 + scale.
    mm_input_projection: kernel [Dv, D], which checkpoints store untransposed.
  """

  def __init__(self, config: VisionConfig, text_dim: int, *, rngs: nnx.Rngs):
    c = self.config = config
    make = LayerMaker(c.sharding, c.param_dtype, rngs)
    self.mm_soft_emb_norm = make.norm(c.embed_dim, c.norm_eps, offset=1.0)
    self.mm_input_projection = make.linear(c.embed_dim, text_dim, "in_out")
    self.mm_input_projection.is_module = False

  def __call__(self, patches: Float[Array, "n P Dv"]) -> Float[Array, "n S D"]:
    """Averages squares of patches, normalizes the averages and projects them.

    Do not multiply the result by sqrt(D); only embeddings of text are scaled.
    """
    c = self.config
    n, _, dim = patches.shape
    edge = c.grid // c.pooled_grid
    squares = (n, c.pooled_grid, edge, c.pooled_grid, edge, dim)
    with jax.named_scope("projector"):
      x = jnp.mean(patches.reshape(squares).astype(jnp.float32), axis=(2, 4))
      x = x.astype(patches.dtype).reshape(n, c.tokens_per_image, dim)
      return self.mm_input_projection(self.mm_soft_emb_norm(x))
