"""Granite 3, dense: sizes of the published checkpoints, and the class."""

from __future__ import annotations

import dataclasses
from typing import Any

from tunix.models.transformer.config import RopeConfig, TransformerConfig, sizes
from tunix.models.transformer.model import Transformer

_ROPE = RopeConfig(theta=5_000_000.0)
_LATER = {"rope": RopeConfig(theta=10_000_000.0), "vocab_size": 49_159}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(TransformerConfig):
  """`TransformerConfig` with Granite's defaults.

  The class methods give the published sizes; keyword arguments override fields:
  `ModelConfig.granite3p3_2b(param_dtype=jnp.bfloat16)`.
  """

  vocab_size: int = 49_155
  head_dim: int = 128
  norm_eps: float = 1e-5
  rope: RopeConfig = _ROPE
  embedding_multiplier: float | None = 12.0
  residual_multiplier: float = 0.22
  tie_embeddings: bool = True
  max_position: int | None = 131_072

  @classmethod
  def granite3p1_2b(cls, **overrides: Any) -> ModelConfig:
    """Granite 3.1 2B (December 2024)."""
    fields = sizes(40, 2048, 8192, 32, 8, head_dim=64)
    fields |= {"query_scale": 1 / 64, "logits_divisor": 8.0}
    return cls(**(fields | overrides))

  @classmethod
  def granite3p1_8b(cls, **overrides: Any) -> ModelConfig:
    """Granite 3.1 8B (December 2024)."""
    fields = sizes(40, 4096, 12800, 32, 8)
    fields |= {"query_scale": 1 / 128, "logits_divisor": 16.0}
    return cls(**(fields | overrides))

  @classmethod
  def granite3p3_2b(cls, **overrides: Any) -> ModelConfig:
    """Granite 3.3 2B (April 2025)."""
    return cls.granite3p1_2b(**(_LATER | overrides))

  @classmethod
  def granite3p3_8b(cls, **overrides: Any) -> ModelConfig:
    """Granite 3.3 8B (April 2025)."""
    return cls.granite3p1_8b(**(_LATER | overrides))


class Granite(Transformer):
  """A dense Granite model; see `Transformer`."""

  config: ModelConfig
