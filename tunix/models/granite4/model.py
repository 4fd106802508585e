"""Granite 4, dense: sizes of the published checkpoints, and the class."""

from __future__ import annotations

import dataclasses
from typing import Any

from tunix.models.transformer.config import RopeConfig, TransformerConfig, sizes
from tunix.models.transformer.model import Transformer

_ROPE = RopeConfig(theta=10_000_000.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(TransformerConfig):
  """`TransformerConfig` with the defaults of dense Granite 4 models.

  The class methods give the published sizes; keyword arguments override fields:
  `ModelConfig.granite4_micro(param_dtype=jnp.bfloat16)`.
  """

  vocab_size: int = 100_352
  norm_eps: float = 1e-5
  rope: RopeConfig = _ROPE
  fused_gate_up: bool = True
  tie_embeddings: bool = True
  embedding_multiplier: float | None = 12.0
  residual_multiplier: float = 0.22
  max_position: int | None = 131_072

  @classmethod
  def granite4_1b(cls, **overrides: Any) -> ModelConfig:
    """Granite 4.0 1B (October 2025)."""
    fields = sizes(40, 2048, 4096, 16, 4, head_dim=128)
    fields |= {"query_scale": 1 / 128, "logits_divisor": 8.0}
    return cls(**(fields | overrides))

  @classmethod
  def granite4_micro(cls, **overrides: Any) -> ModelConfig:
    """Granite 4.0 Micro (October 2025), 3.4B parameters."""
    fields = sizes(40, 2560, 8192, 40, 8, head_dim=64)
    fields |= {"query_scale": 1 / 64, "logits_divisor": 10.0}
    return cls(**(fields | overrides))


class Granite4(Transformer):
  """A dense Granite 4 model; see `Transformer`."""

  config: ModelConfig
