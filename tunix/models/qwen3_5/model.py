"""Qwen3.5: sizes of the published checkpoints, and the class."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from tunix.models.transformer.config import (
  DeltaNetConfig,
  LayerType,
  RopeConfig,
  TransformerConfig,
  fields_by_type,
  sizes,
)
from tunix.models.transformer.model import Transformer

_ROPE = RopeConfig(theta=10_000_000.0, partial=0.25)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Defaults(TransformerConfig):
  """`TransformerConfig` with the defaults of Qwen3.5's text models and mixtures."""

  vocab_size: int = 248_320
  head_dim: int = 256
  norm_offset: float = 1.0
  qk_norm: Literal["head", "all"] | None = "head"
  attention_gate: bool = True
  rope: RopeConfig = _ROPE
  max_position: int | None = 262_144


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Defaults):
  """The configuration of a dense Qwen3.5 text model.

  Three of four layers are gated delta nets, the fourth is attention. The class methods
  give the published sizes; keyword arguments override fields:
  `ModelConfig.qwen3p5_9b(param_dtype=jnp.bfloat16)`.
  """

  @classmethod
  def qwen3p5_0p8b(cls, **overrides: Any) -> ModelConfig:
    """Qwen3.5 0.8B (March 2026)."""
    fields = sizes(24, 1024, 3584, 8, 2, tie_embeddings=True)
    return cls(**(fields | hybrid(24, 16) | overrides))

  @classmethod
  def qwen3p5_2b(cls, **overrides: Any) -> ModelConfig:
    """Qwen3.5 2B (March 2026)."""
    fields = sizes(24, 2048, 6144, 8, 2, tie_embeddings=True)
    return cls(**(fields | hybrid(24, 16) | overrides))

  @classmethod
  def qwen3p5_4b(cls, **overrides: Any) -> ModelConfig:
    """Qwen3.5 4B (March 2026)."""
    fields = sizes(32, 2560, 9216, 16, 4, tie_embeddings=True)
    return cls(**(fields | hybrid(32, 32) | overrides))

  @classmethod
  def qwen3p5_9b(cls, **overrides: Any) -> ModelConfig:
    """Qwen3.5 9B (March 2026)."""
    return cls(**(sizes(32, 4096, 12288, 16, 4) | hybrid(32, 32) | overrides))

  @classmethod
  def qwen3p5_27b(cls, **overrides: Any) -> ModelConfig:
    """Qwen3.5 27B (February 2026); Qwen3.6 27B has the same sizes."""
    return cls(**(sizes(64, 5120, 17408, 24, 4) | hybrid(64, 48) | overrides))


def pattern(layers: int, interval: int = 4) -> tuple[LayerType, ...]:
  """Returns the types of the layers; each `interval`-th one is attention."""
  return tuple("linear" if (i + 1) % interval else "full" for i in range(layers))


def hybrid(layers: int, heads: int, key_heads: int = 16) -> dict[str, Any]:
  """Returns the fields of the layers' types and of their gated delta nets.

  Args:
    layers: number of layers.
    heads, key_heads: heads of values and of keys of a gated delta net.
  """
  mixer = DeltaNetConfig(num_heads=heads, num_key_heads=key_heads)
  return {
    "layer_types": pattern(layers),
    "type_fields": fields_by_type(linear={"mixer": mixer}),
  }


class Qwen3p5(Transformer):
  """A Qwen3.5 text model; see `Transformer`."""

  config: ModelConfig
