"""SmolLM3: the size of the published checkpoint, and the class."""

from __future__ import annotations

import dataclasses
from typing import Any

from tunix.models.transformer.config import (
  LayerType,
  RopeConfig,
  TransformerConfig,
  sizes,
)
from tunix.models.transformer.model import Transformer

_ROPE = RopeConfig(theta=5_000_000.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(TransformerConfig):
  """`TransformerConfig` with SmolLM3's defaults.

  The class methods give the published sizes; keyword arguments override fields:
  `ModelConfig.smollm3_3b(param_dtype=jnp.bfloat16)`.
  """

  vocab_size: int = 128_256
  head_dim: int = 128
  rope: RopeConfig = _ROPE
  tie_embeddings: bool = True
  max_position: int | None = 65_536

  @classmethod
  def smollm3_3b(cls, **overrides: Any) -> ModelConfig:
    """SmolLM3 3B (July 2025): every fourth layer has no rotary embedding."""
    types: tuple[LayerType, ...] = ("full", "full", "full", "nope") * 9
    return cls(**(sizes(36, 2048, 11008, 16, 4, layer_types=types) | overrides))


class SmolLM3(Transformer):
  """A SmolLM3 model; see `Transformer`."""

  config: ModelConfig
