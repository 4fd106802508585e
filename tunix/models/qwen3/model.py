"""Qwen 3 (dense): sizes of the published checkpoints, and the class."""

from __future__ import annotations

import dataclasses
from typing import Any

from flax import nnx

from tunix.models.transformer.config import RopeConfig, TransformerConfig
from tunix.models.transformer.model import Transformer

_ROPE = RopeConfig(theta=1_000_000.0)
_LONG_ROPE = RopeConfig(theta=5_000_000.0)


def _sizes(
  layers: int, dim: int, hidden: int, heads: int, **more: Any
) -> dict[str, Any]:
  return {
    "num_layers": layers,
    "embed_dim": dim,
    "hidden_dim": hidden,
    "num_heads": heads,
    **more,
  }


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(TransformerConfig):
  """`TransformerConfig` with Qwen 3's defaults.

  The class methods give the published sizes; keyword arguments override fields:
  `ModelConfig.qwen3_0p6b(param_dtype=jnp.bfloat16)`.
  """

  vocab_size: int = 151_936
  num_kv_heads: int = 8
  head_dim: int = 128
  rope: RopeConfig = _ROPE
  qk_norm: bool = True
  max_position: int | None = 40_960

  @classmethod
  def qwen3_0p6b(cls, **overrides: Any) -> ModelConfig:
    """Qwen3 0.6B."""
    return cls(**(_sizes(28, 1024, 3072, 16, tie_embeddings=True) | overrides))

  @classmethod
  def qwen3_1p7b(cls, **overrides: Any) -> ModelConfig:
    """Qwen3 1.7B."""
    return cls(**(_sizes(28, 2048, 6144, 16, tie_embeddings=True) | overrides))

  @classmethod
  def qwen3_4b(cls, **overrides: Any) -> ModelConfig:
    """Qwen3 4B."""
    return cls(**(_sizes(36, 2560, 9728, 32, tie_embeddings=True) | overrides))

  @classmethod
  def qwen3_4b_instruct_2507(cls, **overrides: Any) -> ModelConfig:
    """Qwen3 4B of July 2025: a longer context."""
    return cls.qwen3_4b(**({"rope": _LONG_ROPE, "max_position": 262_144} | overrides))

  @classmethod
  def qwen3_8b(cls, **overrides: Any) -> ModelConfig:
    """Qwen3 8B."""
    return cls(**(_sizes(36, 4096, 12288, 32) | overrides))

  @classmethod
  def qwen3_14b(cls, **overrides: Any) -> ModelConfig:
    """Qwen3 14B."""
    return cls(**(_sizes(40, 5120, 17408, 40) | overrides))

  @classmethod
  def qwen3_32b(cls, **overrides: Any) -> ModelConfig:
    """Qwen3 32B."""
    return cls(**(_sizes(64, 5120, 25600, 64) | overrides))

  qwen3_4b_thinking_2507 = qwen3_4b_instruct_2507


class Qwen3(Transformer):
  """A dense Qwen 3 model; see `Transformer`."""

  config: ModelConfig

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
