"""The fields that all vision towers share, and those of a model with a tower."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from tunix.models.transformer.config import (
  REMAT_POLICIES,
  ShardingRules,
  TransformerConfig,
  scans,
)
from tunix.utils import checks

CHANNELS = 3

_RULES = ShardingRules()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TowerConfig:
  """Shape and options of a vision tower.

  Attributes:
    num_layers: number of layers L.
    embed_dim: width Dv of the tower.
    hidden_dim: width F of the MLP.
    num_heads: number of heads N, which must divide embed_dim.
    patch_size: edge of a patch in pixels.
    norm_eps: epsilon of the norms.
    param_dtype: dtype of the weights.
    dtype: dtype of the computation; norms, softmax and pooling are always float32.
    remat: the results that the backward pass recomputes, as in `TransformerConfig`;
      "offload" works like "block".
    scan_layers: as in `TransformerConfig`.
    sharding: mesh axes of the weights and activations.
  """

  num_layers: int
  embed_dim: int
  hidden_dim: int
  num_heads: int
  patch_size: int
  norm_eps: float = 1e-6
  param_dtype: DTypeLike = jnp.float32
  dtype: DTypeLike = jnp.float32
  remat: Literal["none", "block", "dots", "offload"] = "none"
  scan_layers: bool | None = None
  sharding: ShardingRules = _RULES

  def __post_init__(self):
    sizes = "num_layers embed_dim hidden_dim num_heads patch_size"
    counts = dict.fromkeys(sizes.split(), checks.COUNT)
    checks.fields(self, **counts, norm_eps=checks.POSITIVE)
    if self.embed_dim % self.num_heads:
      raise ValueError(
        f"num_heads {self.num_heads} must divide embed_dim {self.embed_dim}"
      )
    if self.remat not in ("none", *REMAT_POLICIES):
      names = ", ".join(("none", *REMAT_POLICIES))
      raise ValueError(f"remat {self.remat!r} must be one of {names}")

  moe = None  # see `params.Stacks`

  def layers_of(self, path: str) -> range:
    """Returns the numbers of the layers in the stack with the parameter `path`."""
    del path
    return range(self.num_layers)

  @property
  def scanned(self) -> bool:
    """True if the layers run in `lax.scan`, see `config.scans`."""
    return scans(self.scan_layers, self.num_layers)


Tower = TypeVar("Tower", bound=TowerConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionLanguageConfig(TransformerConfig):
  """The part of a configuration that is about images.

  A family derives its configuration from the one of its text model and from this class,
  in this order, so that the text model's defaults hold.

  Attributes:
    vision: shape of the tower. Its dtypes, remat, scanning and sharding are replaced by
      those of this configuration, see `in_model`.
  """

  vision: TowerConfig

  @property
  def soft_token(self) -> int:
    """The id of the tokens whose embeddings are replaced by vectors of images."""
    raise NotImplementedError

  @property
  def image_sizes(self) -> tuple[int, int]:
    """The numbers that the image processor must share.

    For squares: pixels of an edge, soft tokens of a square. For patches: pixels of an
    edge, patches along the edge of a soft token.
    """
    raise NotImplementedError

  def rope_offsets(
    self,
    tokens: Int[Array, "B T"],
    images: Any,
    segment_ids: Int[Array, "B T"] | None = None,
  ) -> Int[Array, "B T R/2"] | None:
    """Returns what images change rotary positions by; None: they do not.

    Args:
      tokens, images, segment_ids: see `VisionLanguageModel.__call__`.
    """
    del tokens, images, segment_ids
    return None

  def layers_of(self, path: str) -> Sequence[int]:
    """Returns the numbers of the layers in the stack with the parameter `path`."""
    in_tower = path.startswith("vision_tower.")
    return self.vision.layers_of(path) if in_tower else super().layers_of(path)


def in_model(vision: Tower, config: TransformerConfig) -> Tower:
  """Returns a tower's configuration with the dtypes and options of its model."""
  return dataclasses.replace(
    vision,
    dtype=config.dtype,
    param_dtype=config.param_dtype,
    remat=config.remat,
    scan_layers=config.scan_layers,
    sharding=config.sharding,
  )
