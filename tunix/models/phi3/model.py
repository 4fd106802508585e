"""Phi 3 and 4: sizes of the published checkpoints, and the class."""

from __future__ import annotations

import dataclasses
from typing import Any

from tunix.models.transformer.config import RopeConfig, TransformerConfig, sizes
from tunix.models.transformer.model import Transformer

_ROPE = RopeConfig(theta=10_000.0)
_MINI_ROPE = RopeConfig(
  partial=0.75,
  scaling="longrope",
  factor=32.0,
  original_max_position=4096,
  short_factors=(1.0,) * 48,
  long_factors=(1.0,) * 48,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(TransformerConfig):
  """`TransformerConfig` with the defaults of Phi 3 and 4.

  The class methods give published sizes; keyword arguments override fields:
  `ModelConfig.phi4_14b(param_dtype=jnp.bfloat16)`.
  """

  vocab_size: int = 100_352
  head_dim: int = 128
  norm_eps: float = 1e-5
  rope: RopeConfig = _ROPE
  fused_qkv: bool = True
  fused_gate_up: bool = True
  max_position: int | None = 16_384

  @classmethod
  def phi4_14b(cls, **overrides: Any) -> ModelConfig:
    """Phi 4 14B (December 2024)."""
    fields = sizes(40, 5120, 17_920, 40, 10, rope=RopeConfig(theta=250_000.0))
    return cls(**(fields | overrides))

  @classmethod
  def phi4_mini_3p8b(cls, **overrides: Any) -> ModelConfig:
    """Phi 4 mini 3.8B (February 2025), for sequences of up to 4,096 tokens.

    The divisors of its rotary frequencies for longer sequences are not part of this
    preset. A folder has them in its `config.json`.
    """
    fields = sizes(32, 3072, 8192, 24, 8, vocab_size=200_064, tie_embeddings=True)
    return cls(**(fields | {"rope": _MINI_ROPE, "max_position": 4096} | overrides))


class Phi3(Transformer):
  """A Phi 3 or Phi 4 model; see `Transformer`."""

  config: ModelConfig
