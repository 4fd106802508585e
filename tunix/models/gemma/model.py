"""Gemma 1, 1.1 and 2: sizes of the published checkpoints, and the class."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from tunix.models.transformer.config import Activation, TransformerConfig, sizes
from tunix.models.transformer.model import Transformer


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(TransformerConfig):
  """`TransformerConfig` with Gemma's defaults; norms="both" makes it a Gemma 2.

  The class methods give the published sizes; keyword arguments override fields:
  `ModelConfig.gemma2_2b(param_dtype=jnp.bfloat16)`.
  """

  vocab_size: int = 256_000
  head_dim: int = 256
  norm_offset: float = 1.0
  activation: Activation = "gelu_tanh"
  tie_embeddings: bool = True
  scale_embeddings: bool = True
  max_position: int | None = 8192

  @classmethod
  def gemma_2b(cls, **overrides: Any) -> ModelConfig:
    """Gemma 2B and 1.1 2B."""
    return cls(**(sizes(18, 2048, 16384, 8, 1) | overrides))

  @classmethod
  def gemma_7b(cls, **overrides: Any) -> ModelConfig:
    """Gemma 7B and 1.1 7B."""
    return cls(**(sizes(28, 3072, 24576, 16, 16) | overrides))

  @classmethod
  def gemma2_2b(cls, **overrides: Any) -> ModelConfig:
    """Gemma 2 2B."""
    return cls(**(_gemma2(26, 2304, 9216, 8, 4, 256) | overrides))

  @classmethod
  def gemma2_9b(cls, **overrides: Any) -> ModelConfig:
    """Gemma 2 9B."""
    return cls(**(_gemma2(42, 3584, 14336, 16, 8, 256) | overrides))

  @classmethod
  def gemma2_27b(cls, **overrides: Any) -> ModelConfig:
    """Gemma 2 27B."""
    fields = _gemma2(46, 4608, 36864, 32, 16, 144)
    fields["head_dim"] = 128
    return cls(**(fields | overrides))

  gemma_2b_it = gemma1p1_2b_it = gemma_2b
  gemma_7b_it = gemma1p1_7b_it = gemma_7b
  gemma2_2b_it = gemma2_2b
  gemma2_9b_it = gemma2_9b
  gemma2_27b_it = gemma2_27b


def _gemma2(
  layers: int, dim: int, hidden: int, heads: int, kv_heads: int, query_scalar: int
) -> dict[str, Any]:
  norms: Literal["both"] = "both"
  return sizes(
    layers,
    dim,
    hidden,
    heads,
    kv_heads,
    norms=norms,
    query_scale=query_scalar**-0.5,
    attention_softcap=50.0,
    final_softcap=30.0,
    layer_types=tuple("full" if i % 2 else "sliding" for i in range(layers)),
    sliding_window=4096,
  )


class Gemma(Transformer):
  """A Gemma 1 or 2 model; see `Transformer`."""

  config: ModelConfig
