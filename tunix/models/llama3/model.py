"""Llama 3, 3.1, 3.2 and 3.3: sizes of the published checkpoints, and the class."""

from __future__ import annotations

import dataclasses
from typing import Any

from tunix.models.transformer.config import RopeConfig, TransformerConfig, sizes
from tunix.models.transformer.model import Transformer

_THETA = 500_000.0
_UNSCALED = RopeConfig(theta=_THETA)


def _long(factor: float) -> dict[str, Any]:
  """Fields of Llama 3.1 and later: rotary scaling from 8,192 to 131,072 tokens."""
  rope = RopeConfig(
    theta=_THETA,
    scaling="llama3",
    factor=factor,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position=8192,
  )
  return {"rope": rope, "max_position": 131_072}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(TransformerConfig):
  """`TransformerConfig` with Llama 3's defaults.

  The class methods give the published sizes; keyword arguments override fields:
  `ModelConfig.llama3p2_1b(param_dtype=jnp.bfloat16)`.
  """

  vocab_size: int = 128_256
  head_dim: int = 128
  norm_eps: float = 1e-5
  rope: RopeConfig = _UNSCALED
  max_position: int | None = 8192

  @classmethod
  def llama3_8b(cls, **overrides: Any) -> ModelConfig:
    """Llama 3 8B."""
    return cls(**(sizes(32, 4096, 14336, 32, 8) | overrides))

  @classmethod
  def llama3_70b(cls, **overrides: Any) -> ModelConfig:
    """Llama 3 70B."""
    return cls(**(sizes(80, 8192, 28672, 64, 8) | overrides))

  @classmethod
  def llama3p1_8b(cls, **overrides: Any) -> ModelConfig:
    """Llama 3.1 8B: Llama 3 with a longer context."""
    return cls.llama3_8b(**(_long(8.0) | overrides))

  @classmethod
  def llama3p1_70b(cls, **overrides: Any) -> ModelConfig:
    """Llama 3.1 70B; Llama 3.3 70B has the same sizes."""
    return cls.llama3_70b(**(_long(8.0) | overrides))

  @classmethod
  def llama3p1_405b(cls, **overrides: Any) -> ModelConfig:
    """Llama 3.1 405B."""
    return cls(**(sizes(126, 16384, 53248, 128, 8) | _long(8.0) | overrides))

  @classmethod
  def llama3p2_1b(cls, **overrides: Any) -> ModelConfig:
    """Llama 3.2 1B."""
    fields = sizes(16, 2048, 8192, 32, 8, head_dim=64, tie_embeddings=True)
    return cls(**(fields | _long(32.0) | overrides))

  @classmethod
  def llama3p2_3b(cls, **overrides: Any) -> ModelConfig:
    """Llama 3.2 3B."""
    fields = sizes(28, 3072, 8192, 24, 8, tie_embeddings=True)
    return cls(**(fields | _long(32.0) | overrides))

  llama3p2_1b_instruct = llama3p2_1b
  llama3p2_3b_instruct = llama3p2_3b
  llama3p3_70b = llama3p1_70b


class Llama3(Transformer):
  """A Llama 3 model; see `Transformer`."""

  config: ModelConfig
