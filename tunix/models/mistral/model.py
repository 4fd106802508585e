"""Mistral: sizes of the published checkpoints, and the class."""

from __future__ import annotations

import dataclasses
from typing import Any

from tunix.models.transformer.config import RopeConfig, TransformerConfig, sizes
from tunix.models.transformer.model import Transformer

_ROPE = RopeConfig(theta=1_000_000.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(TransformerConfig):
  """`TransformerConfig` with Mistral's defaults.

  The class methods give the published sizes; keyword arguments override fields:
  `ModelConfig.mistral_7b_v0p3(param_dtype=jnp.bfloat16)`.
  """

  vocab_size: int = 32_768
  head_dim: int = 128
  norm_eps: float = 1e-5
  rope: RopeConfig = _ROPE
  max_position: int | None = 32_768

  @classmethod
  def mistral_7b_v0p1(cls, **overrides: Any) -> ModelConfig:
    """Mistral 7B v0.1: a window of 4,096 tokens in every layer."""
    fields = sizes(32, 4096, 14336, 32, 8, vocab_size=32_000)
    fields |= {
      "rope": RopeConfig(theta=10_000.0),
      "layer_types": ("sliding",) * 32,
      "sliding_window": 4096,
    }
    return cls(**(fields | overrides))

  @classmethod
  def mistral_7b_v0p3(cls, **overrides: Any) -> ModelConfig:
    """Mistral 7B v0.3, base and instruct: no window."""
    return cls(**(sizes(32, 4096, 14336, 32, 8) | overrides))

  @classmethod
  def mistral_nemo_12b(cls, **overrides: Any) -> ModelConfig:
    """Mistral Nemo 12B (July 2024): heads narrower than D / N."""
    fields = sizes(40, 5120, 14336, 32, 8, vocab_size=131_072, max_position=131_072)
    return cls(**(fields | overrides))


class Mistral(Transformer):
  """A Mistral model; see `Transformer`."""

  config: ModelConfig
