"""Gemma 4 with images: the text model, its tower and the projector together."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tunix.models.gemma4.model import Gemma4, ModelConfig
from tunix.models.gemma4.vision import Gemma4Tower, Gemma4TowerConfig, Projector
from tunix.models.transformer.dense.layers import Embedding
from tunix.models.transformer.token_rows import TokenRows
from tunix.models.vision.config import VisionLanguageConfig, in_model
from tunix.models.vision.model import PatchesModel
from tunix.utils import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultimodalConfig(ModelConfig, VisionLanguageConfig):
  """`ModelConfig` of a Gemma 4 with images.

  Attributes:
    vision: see `VisionLanguageConfig`.
    attends_within_images: if True, the tokens of an image attend to each other in both
      directions in the sliding layers (31B, 26B-A4B); if False, attention is causal
      (E2B, E4B).
    image_token_id: id of the soft tokens, <|image|>.
    pad_token_id: id by which the layers' vectors of soft tokens are looked up.
  """

  vision: Gemma4TowerConfig
  attends_within_images: bool = False
  image_token_id: int = 258_880
  pad_token_id: int = 0

  def __post_init__(self):
    super().__post_init__()
    ids = ("image_token_id", "pad_token_id")
    checks.fields(self, **dict.fromkeys(ids, checks.NOT_NEGATIVE))

  @property
  def soft_token(self) -> int:
    """See `VisionLanguageConfig`."""
    return self.image_token_id

  @property
  def image_sizes(self) -> tuple[int, int]:
    """See `VisionLanguageConfig`."""
    return self.vision.patch_size, self.vision.pooling


class _LayerTable(Embedding):
  """The table of the layers' vectors, in which soft tokens have the row of `pad`.

  They do not train this row, which is no row of an image.
  """

  def __init__(self, table: Embedding, soft: int, pad: int):
    self.embedding, self.scale = table.embedding, table.scale
    self.soft, self.pad = soft, pad

  def __call__(
    self, tokens: jax.Array, dtype: DTypeLike, rows: TokenRows | None = None
  ) -> jax.Array:
    is_soft = tokens == self.soft
    x = super().__call__(jnp.where(is_soft, self.pad, tokens), dtype, rows)
    return jnp.where(is_soft[..., None], jax.lax.stop_gradient(x), x)


class MultimodalGemma4(Gemma4, PatchesModel):
  """A Gemma 4 model with images; see `PatchesModel`."""

  config: MultimodalConfig

  def __init__(self, config: MultimodalConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    if self.layer_inputs is not None:
      ids = config.image_token_id, config.pad_token_id
      self.layer_inputs.table = _LayerTable(self.layer_inputs.table, *ids)
    tower = in_model(config.vision, config)
    self.attends_within_images = config.attends_within_images
    self.vision_tower = Gemma4Tower(tower, rngs=rngs)
    self.multi_modal_projector = Projector(tower, config.embed_dim, rngs=rngs)
