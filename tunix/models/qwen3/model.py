"""Qwen 3: sizes of the published checkpoints, and the class."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from tunix.models.transformer.config import (
  MoEConfig,
  RopeConfig,
  TransformerConfig,
  sizes,
)
from tunix.models.transformer.model import Transformer

_ROPE = RopeConfig(theta=1_000_000.0)
_LONG_ROPE = RopeConfig(theta=5_000_000.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(TransformerConfig):
  """`TransformerConfig` with Qwen 3's defaults.

  The class methods give the published sizes; keyword arguments override fields:
  `ModelConfig.qwen3_0p6b(param_dtype=jnp.bfloat16)`.
  """

  vocab_size: int = 151_936
  head_dim: int = 128
  rope: RopeConfig = _ROPE
  qk_norm: Literal["head", "all"] | None = "head"
  max_position: int | None = 40_960

  @classmethod
  def qwen3_0p6b(cls, **overrides: Any) -> ModelConfig:
    """Qwen3 0.6B."""
    return cls(**(sizes(28, 1024, 3072, 16, 8, tie_embeddings=True) | overrides))

  @classmethod
  def qwen3_1p7b(cls, **overrides: Any) -> ModelConfig:
    """Qwen3 1.7B."""
    return cls(**(sizes(28, 2048, 6144, 16, 8, tie_embeddings=True) | overrides))

  @classmethod
  def qwen3_4b(cls, **overrides: Any) -> ModelConfig:
    """Qwen3 4B."""
    return cls(**(sizes(36, 2560, 9728, 32, 8, tie_embeddings=True) | overrides))

  @classmethod
  def qwen3_4b_instruct_2507(cls, **overrides: Any) -> ModelConfig:
    """Qwen3 4B of July 2025: a longer context."""
    return cls.qwen3_4b(**({"rope": _LONG_ROPE, "max_position": 262_144} | overrides))

  @classmethod
  def qwen3_8b(cls, **overrides: Any) -> ModelConfig:
    """Qwen3 8B."""
    return cls(**(sizes(36, 4096, 12288, 32, 8) | overrides))

  @classmethod
  def qwen3_14b(cls, **overrides: Any) -> ModelConfig:
    """Qwen3 14B."""
    return cls(**(sizes(40, 5120, 17408, 40, 8) | overrides))

  @classmethod
  def qwen3_32b(cls, **overrides: Any) -> ModelConfig:
    """Qwen3 32B."""
    return cls(**(sizes(64, 5120, 25600, 64, 8) | overrides))

  @classmethod
  def qwen3_30b_a3b(cls, **overrides: Any) -> ModelConfig:
    """Qwen3 30B-A3B: 128 experts, 8 of them for each token."""
    experts = MoEConfig(num_experts=128, experts_per_token=8, hidden_dim=768)
    return cls(**(sizes(48, 2048, 6144, 32, 4, moe=experts) | overrides))

  qwen3_4b_thinking_2507 = qwen3_4b_instruct_2507


class Qwen3(Transformer):
  """A Qwen 3 model, dense or a mixture of experts; see `Transformer`."""

  config: ModelConfig
