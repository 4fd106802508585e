"""Ministral 3: sizes of the published text models, and the class."""

from __future__ import annotations

import dataclasses
from typing import Any

from tunix.models.transformer.config import RopeConfig, TransformerConfig, sizes
from tunix.models.transformer.model import Transformer

_ROPE = RopeConfig(
  theta=1_000_000.0,
  scaling="yarn",
  factor=16.0,
  original_max_position=16_384,
  mscale=1.0,
  mscale_all_dim=1.0,
  query_beta=0.1,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(TransformerConfig):
  """`TransformerConfig` with Ministral 3's defaults.

  The class methods give the published sizes; keyword arguments override fields:
  `ModelConfig.ministral3_8b(param_dtype=jnp.bfloat16)`.
  """

  vocab_size: int = 131_072
  head_dim: int = 128
  norm_eps: float = 1e-5
  rope: RopeConfig = _ROPE
  max_position: int | None = 262_144

  @classmethod
  def ministral3_3b(cls, **overrides: Any) -> ModelConfig:
    """Ministral 3 3B (December 2025)."""
    return cls(**(sizes(26, 3072, 9216, 32, 8, tie_embeddings=True) | overrides))

  @classmethod
  def ministral3_8b(cls, **overrides: Any) -> ModelConfig:
    """Ministral 3 8B (December 2025)."""
    return cls(**(sizes(34, 4096, 14336, 32, 8) | overrides))

  @classmethod
  def ministral3_14b(cls, **overrides: Any) -> ModelConfig:
    """Ministral 3 14B (December 2025)."""
    rope = dataclasses.replace(_ROPE, theta=1_000_000_000.0)
    return cls(**(sizes(40, 5120, 16384, 32, 8, rope=rope) | overrides))


class Ministral3(Transformer):
  """A Ministral 3 text model; see `Transformer`."""

  config: ModelConfig
