"""Gemma 3 with images: the text model, the vision tower and the projector together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tunix.models.gemma3.image_tokens import ImageTokens, image_groups, scatter_images
from tunix.models.gemma3.model import Gemma3, ModelConfig
from tunix.models.gemma3.vision import Projector, VisionConfig, VisionTower
from tunix.models.transformer.cache import KVCache
from tunix.models.transformer.shards import explicit

_VISION = VisionConfig()
_TOKENS = ImageTokens()


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultimodalConfig(ModelConfig):
  """`ModelConfig` of a Gemma 3 with images, for the sizes from 4B.

  Attributes:
    vision: shape of the vision tower. Its dtypes, remat, scanning and sharding are
      replaced by those of this configuration.
    image_tokens: the token ids around an image.
  """

  vision: VisionConfig = _VISION
  image_tokens: ImageTokens = _TOKENS

  def layers_of(self, path: str) -> Sequence[int]:
    """Returns the numbers of the layers in the stack with the parameter `path`."""
    in_tower = path.startswith("vision_tower.")
    return self.vision.layers_of(path) if in_tower else super().layers_of(path)


class MultimodalGemma3(Gemma3):
  """A Gemma 3 model with images; see `Transformer`.

  Attributes:
    vision_tower, multi_modal_projector: turn pixels into soft tokens.
  """

  config: MultimodalConfig

  def __init__(self, config: MultimodalConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    vision = dataclasses.replace(
      config.vision,
      dtype=config.dtype,
      param_dtype=config.param_dtype,
      remat=config.remat,
      scan_layers=config.scan_layers,
      sharding=config.sharding,
    )
    self.vision_tower = VisionTower(vision, rngs=rngs)
    self.multi_modal_projector = Projector(vision, config.embed_dim, rngs=rngs)

  @explicit.auto_inside(explicit.call_specs)
  def __call__(
    self,
    input_tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"] | None = None,
    cache: KVCache | None = None,
    attention_mask: Bool[Array, "B T S"] | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    images: jax.Array | None = None,
    **options: object,
  ) -> tuple[jax.Array, KVCache | None]:
    """Runs `Transformer.__call__` with images.

    Args:
      input_tokens, positions, cache, attention_mask, segment_ids, options: see
        `Transformer.__call__`. With a cache, a call must hold all tokens of its images.
      images: pixels in [-1, 1] (see `images.preprocess`): [n, S, S, 3] in the order of
        the batch's soft tokens, or [B, M, S, S, 3] by row. Images by row stay with
        their rows when a batch is cut. Rows whose images do not match their soft tokens
        become NaN; `image_tokens.check_images` finds them before the call. None looks
        soft tokens up like any other token.

    Raises:
      ValueError: see `Transformer.__call__`; or images are combined with
        `input_embeddings` or `groups`.
    """
    if images is not None:
      if {"input_embeddings", "groups"} & options.keys():
        raise ValueError(
          "images cannot be combined with input_embeddings or groups, which are made "
          "from them"
        )
      soft = self.config.image_tokens.soft
      # The id of a soft token may exceed the vocabulary. Its embedding is replaced.
      x = self.embed(jnp.where(input_tokens == soft, 0, input_tokens))
      features = self.image_features(images)
      options["input_embeddings"] = scatter_images(x, input_tokens, features, soft)
      options["groups"] = image_groups(input_tokens, soft)
    return super().__call__(
      input_tokens,
      positions,
      cache,
      attention_mask,
      segment_ids=segment_ids,
      **options,
    )

  def image_features(self, images: Float[Array, "*n S S 3"]) -> Float[Array, "*n K D"]:
    """Returns the vectors of the images' soft tokens, K per image."""
    with jax.named_scope("vision"):
      lead, flat = images.shape[:-3], images.reshape(-1, *images.shape[-3:])
      features = self.multi_modal_projector(self.vision_tower(flat))
      return features.reshape(*lead, *features.shape[1:])
