"""OLMo 2: sizes of the published checkpoints, and the class."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from tunix.models.transformer.config import RopeConfig, TransformerConfig, sizes
from tunix.models.transformer.model import Transformer

_ROPE = RopeConfig(theta=500_000.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(TransformerConfig):
  """`TransformerConfig` with OLMo 2's defaults.

  The class methods give the published sizes; keyword arguments override fields:
  `ModelConfig.olmo2_7b(param_dtype=jnp.bfloat16)`.
  """

  vocab_size: int = 100_352
  head_dim: int = 128
  norms: Literal["pre", "post", "both"] = "post"
  qk_norm: Literal["head", "all"] | None = "all"
  rope: RopeConfig = _ROPE
  max_position: int | None = 4096

  @classmethod
  def olmo2_1b(cls, **overrides: Any) -> ModelConfig:
    """OLMo 2 1B (April 2025)."""
    return cls(**(sizes(16, 2048, 8192, 16, 16) | overrides))

  @classmethod
  def olmo2_7b(cls, **overrides: Any) -> ModelConfig:
    """OLMo 2 7B (November 2024)."""
    return cls(**(sizes(32, 4096, 11008, 32, 32) | overrides))

  @classmethod
  def olmo2_13b(cls, **overrides: Any) -> ModelConfig:
    """OLMo 2 13B (November 2024)."""
    return cls(**(sizes(40, 5120, 13824, 40, 40) | overrides))

  @classmethod
  def olmo2_32b(cls, **overrides: Any) -> ModelConfig:
    """OLMo 2 32B (March 2025)."""
    return cls(**(sizes(64, 5120, 27648, 40, 8) | overrides))


class Olmo2(Transformer):
  """An OLMo 2 model; see `Transformer`."""

  config: ModelConfig
