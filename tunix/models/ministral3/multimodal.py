"""Ministral 3 with images: Pixtral's tower, a merger of patches, and the text model."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from tunix.models.ministral3.model import Ministral3, ModelConfig
from tunix.models.transformer.config import Activation
from tunix.models.transformer.dense.layers import ACTIVATIONS
from tunix.models.transformer.layer_maker import LayerMaker
from tunix.models.vision.config import VisionLanguageConfig, in_model
from tunix.models.vision.model import PatchesModel
from tunix.models.vision.pixtral import PixtralConfig, PixtralTower, squares
from tunix.utils import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultimodalConfig(ModelConfig, VisionLanguageConfig):
  """`ModelConfig` of a Ministral 3 with images.

  Attributes:
    vision: see `VisionLanguageConfig`.
    merge: edge of the square of patches that makes one soft token.
    image_token_id: id of the soft tokens, [IMG].
    projector_activation: activation function of the projector.
    projector_bias: if True, the projector's two maps have biases.
  """

  vision: PixtralConfig
  merge: int = 2
  image_token_id: int = 10
  projector_activation: Activation = "gelu"
  projector_bias: bool = False

  def __post_init__(self):
    super().__post_init__()
    checks.fields(self, merge=checks.COUNT, image_token_id=checks.NOT_NEGATIVE)

  @property
  def soft_token(self) -> int:
    """See `VisionLanguageConfig`."""
    return self.image_token_id

  @property
  def image_sizes(self) -> tuple[int, int]:
    """See `VisionLanguageConfig`."""
    return self.vision.patch_size, self.merge


class Projector(nnx.Module):
  """Projector of squares of patches to soft tokens.

  Attributes:
    norm: RMS norm of the patches.
    merging_layer: linear map of the patches of a square, [m^2 Dv, Dv].
    linear_1, linear_2: linear maps [Dv, D] and [D, D].
  """

  def __init__(self, config: MultimodalConfig, *, rngs: nnx.Rngs):
    c, dim = config, config.vision.embed_dim
    make = LayerMaker(c.sharding, c.param_dtype, rngs)
    self.norm = make.norm(dim, c.norm_eps)
    self.merging_layer = make.linear(c.merge**2 * dim, dim, "in_out")
    self.linear_1 = make.linear(dim, c.embed_dim, "in_out", bias=c.projector_bias)
    self.linear_2 = make.linear(
      c.embed_dim, c.embed_dim, "out_in", bias=c.projector_bias
    )
    self.merge = c.merge
    self.activation = ACTIVATIONS[c.projector_activation]

  def __call__(
    self, patches: Float[Array, "n P Dv"], grid: Int[Array, "n N 2"]
  ) -> Float[Array, "n K D"]:
    """Returns the vectors of K = P / m^2 soft tokens; those of padding are NaN."""
    index, valid = squares(grid, patches.shape[1], self.merge)
    with jax.named_scope("projector"):
      x = jax.vmap(lambda row, at: row[at])(self.norm(patches), index)
      # The merger's inputs count the patches of a square within each feature.
      x = x.swapaxes(-1, -2).reshape(*valid.shape, x.shape[-1] * x.shape[-2])
      x = self.merging_layer(x)
      x = self.linear_2(self.activation(self.linear_1(x)))
      return jnp.where(valid[..., None], x, jnp.nan)


class MultimodalMinistral3(Ministral3, PatchesModel):
  """A Ministral 3 model with images; see `PatchesModel`."""

  config: MultimodalConfig

  def __init__(self, config: MultimodalConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    self.vision_tower = PixtralTower(in_model(config.vision, config), rngs=rngs)
    self.multi_modal_projector = Projector(config, rngs=rngs)
