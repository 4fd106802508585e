"""A decoder that reads images: soft tokens get the vectors of a vision tower."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Int

from tunix.models.transformer.cache import KVCache
from tunix.models.transformer.dense import dropout
from tunix.models.transformer.model import Transformer
from tunix.models.transformer.shards import explicit
from tunix.models.vision.config import VisionLanguageConfig
from tunix.models.vision.layers import retype
from tunix.models.vision.soft_tokens import image_groups, scatter_images


class VisionLanguageModel(Transformer):
  """A `Transformer` with a vision tower.

  A family derives its model from its text model and from this class, in this order, and
  makes the two modules.

  Attributes:
    vision_tower: makes one vector per patch of an image; frozen, see `train_tower`.
    multi_modal_projector: makes the vectors of the soft tokens from them.
    attends_within_images: True if the tokens of an image attend to each other in both
      directions; else attention is causal.
  """

  config: VisionLanguageConfig
  vision_tower: nnx.Module
  multi_modal_projector: nnx.Module
  attends_within_images = False

  @explicit.auto_inside(explicit.call_specs)
  def __call__(
    self,
    input_tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"] | None = None,
    cache: KVCache | None = None,
    attention_mask: Bool[Array, "B T S"] | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    images: Any = None,
    **options: object,
  ) -> tuple[jax.Array, KVCache | None]:
    """Runs `Transformer.__call__` with images.

    Args:
      input_tokens, positions, cache, attention_mask, segment_ids, options: see
        `Transformer.__call__`. With a cache, a call must hold all tokens of its images.
      images: the images of the batch or of its rows, see `image_features`, in the order
        of the soft tokens. Images by row stay with their rows when a batch is cut; k
        adjacent rows of tokens may share a row of images, see `scatter_images`. Rows
        with too few images become NaN; `soft_tokens.check_images` finds them before the
        call. None looks soft tokens up like any other token.

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
      options |= self.image_options(input_tokens, images, segment_ids)
    return super().__call__(
      input_tokens,
      positions,
      cache,
      attention_mask,
      segment_ids=segment_ids,
      **options,
    )

  def image_options(
    self,
    tokens: Int[Array, "B T"],
    images: Any,
    segment_ids: Int[Array, "B T"] | None,
  ) -> dict[str, Any]:
    """Returns the arguments of `Transformer.__call__` that are made from images."""
    soft = self.config.soft_token
    # The id of a soft token may exceed the vocabulary. Its embedding is replaced.
    x = self.embed(jnp.where(tokens == soft, 0, tokens))
    features, *deeper = self.features_of_layers(images)
    options: dict[str, Any] = {
      "input_embeddings": scatter_images(x, tokens, features, soft)
    }
    if self.attends_within_images:
      options["groups"] = image_groups(tokens, soft)
    if deeper:
      nothing = jnp.zeros_like(x)
      added = [scatter_images(nothing, tokens, each, soft) for each in deeper]
      options["deepstack"] = jnp.stack(added)
    offsets = self.config.rope_offsets(tokens, images, segment_ids)
    return options if offsets is None else options | {"rope_offsets": offsets}

  def features_of_layers(self, images: Any) -> Sequence[jax.Array]:
    """Returns `image_features`, and the vectors that early layers add to them."""
    return (self.image_features(images),)

  def position_shift(self, tokens: Int[Array, "B T"], images: Any) -> jax.Array:
    """Returns what positions after rows with images change by, int32 [B]."""
    tokens = jnp.pad(tokens, ((0, 0), (0, 1)), constant_values=-1)  # the next token
    offsets = self.config.rope_offsets(tokens, images)
    return jnp.zeros(len(tokens), jnp.int32) if offsets is None else offsets[:, -1, 0]

  def _count_rows(self, rows: int) -> None:
    """Counts the rows of the tower's input for the dropout of its adapters."""
    dropout.advance(self.vision_tower, rows)
    dropout.advance(self.multi_modal_projector, rows)

  def train_tower(self) -> None:
    """Makes the tower's parameters trainable, in place; new models freeze them.

    Trainers of adapters train the adapters alone, whatever the tower is.
    """
    retype(self.vision_tower, nnx.Param)

  def image_features(self, images: Any) -> jax.Array:
    """Returns the vectors of the images' soft tokens, [*n, K, D] with K per image.

    Args:
      images: pixels in [-1, 1], float [*n, S, S, 3] with the tower's image size S. The
        leading axes are [n] for the images of a batch, or [B, M] for M images of each
        row.
    """
    with jax.named_scope("vision"):
      lead, flat = images.shape[:-3], images.reshape(-1, *images.shape[-3:])
      features = self.multi_modal_projector(self.vision_tower(flat))
      self._count_rows(len(flat))
      return features.reshape(*lead, *features.shape[1:])


class PatchesModel(VisionLanguageModel):
  """A `VisionLanguageModel` of images of any size, which are given as patches.

  Its tower is called with the patches and their grids, and its projector with the
  outputs of the tower and the grids. A projector whose vectors go to several layers
  returns a list.
  """

  def image_features(self, images: Any) -> jax.Array:
    """Returns the vectors of the soft tokens.

    Args:
      images: a pair (values, grid), see `PixtralTower`. The pixels are [P, d] for the
        images of a batch, or [B, P, d] for those of each row; the grids [N, k] or
        [B, N, k]. Their last two numbers are rows and columns, multiples of the m
        patches along the edge of a soft token; a number of frames before them is 1. If
        they are not, or if the grids need more than P patches, all vectors (of the row)
        are NaN.

    Returns:
      The vectors [1, K, D] of the batch or [B, 1, K, D] of the rows, K = P / m^2; those
      of padding are NaN.
    """
    return self.features_of_layers(images)[0]

  def features_of_layers(self, images: Any) -> Sequence[jax.Array]:
    """See `VisionLanguageModel`."""
    values, grid = (jnp.asarray(part) for part in images)
    by_row = values.ndim == 3
    if not by_row:
      values, grid = values[None], grid[None]
    with jax.named_scope("vision"):
      patches = self.vision_tower(values, grid)
      features = self.multi_modal_projector(patches, grid)
      self._count_rows(len(values))
    several = features if isinstance(features, list) else [features]
    return [x[:, None] for x in several] if by_row else several
