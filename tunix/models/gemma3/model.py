"""Gemma 3: sizes of the published checkpoints, and the class."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from tunix.models.transformer.config import (
  Activation,
  RopeConfig,
  TransformerConfig,
  sizes,
)
from tunix.models.transformer.model import Transformer

# Prefixes of the presets whose checkpoints are text models; the others take images.
TEXT_SIZES = ("gemma3_270m", "gemma3_1b")

_GLOBAL = RopeConfig(theta=1_000_000.0)
_LOCAL = RopeConfig(theta=10_000.0)
_LONG = RopeConfig(theta=1_000_000.0, scaling="linear", factor=8.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(TransformerConfig):
  """`TransformerConfig` with Gemma 3's defaults.

  The class methods give the published sizes; keyword arguments override fields:
  `ModelConfig.gemma3_1b(param_dtype=jnp.bfloat16)`.
  """

  vocab_size: int = 262_144
  head_dim: int = 256
  norm_offset: float = 1.0
  norms: Literal["pre", "post", "both"] = "both"
  activation: Activation = "gelu_tanh"
  rope: RopeConfig = _GLOBAL
  local_rope: RopeConfig | None = _LOCAL
  query_scale: float | None = 256**-0.5
  tie_embeddings: bool = True
  scale_embeddings: bool = True
  qk_norm: Literal["head", "all"] | None = "head"
  max_position: int | None = 131_072

  @classmethod
  def gemma3_270m(cls, **overrides: Any) -> ModelConfig:
    """Gemma 3 270M."""
    fields = sizes(18, 640, 2048, 4, 1, max_position=32_768)
    return cls(**(fields | _pattern(18, 512) | overrides))

  @classmethod
  def gemma3_1b(cls, **overrides: Any) -> ModelConfig:
    """Gemma 3 1B."""
    fields = sizes(26, 1152, 6912, 4, 1, max_position=32_768)
    return cls(**(fields | _pattern(26, 512) | overrides))

  @classmethod
  def gemma3_4b(cls, **overrides: Any) -> ModelConfig:
    """Gemma 3 4B."""
    fields = sizes(34, 2560, 10240, 8, 4, rope=_LONG, vocab_size=262_208)
    return cls(**(fields | _pattern(34, 1024) | overrides))

  @classmethod
  def gemma3_12b(cls, **overrides: Any) -> ModelConfig:
    """Gemma 3 12B."""
    fields = sizes(48, 3840, 15360, 16, 8, rope=_LONG, vocab_size=262_208)
    return cls(**(fields | _pattern(48, 1024) | overrides))

  @classmethod
  def gemma3_27b(cls, **overrides: Any) -> ModelConfig:
    """Gemma 3 27B."""
    fields = sizes(62, 5376, 21504, 32, 16, rope=_LONG, vocab_size=262_208)
    fields |= {"head_dim": 128, "query_scale": 168**-0.5}
    return cls(**(fields | _pattern(62, 1024) | overrides))

  gemma3_270m_it = gemma3_270m
  gemma3_1b_it = gemma3_1b_pt = gemma3_1b
  gemma3_4b_it = gemma3_4b_pt = gemma3_4b
  gemma3_12b_it = gemma3_12b_pt = gemma3_12b
  gemma3_27b_it = gemma3_27b_pt = gemma3_27b


def _pattern(layers: int, window: int) -> dict[str, Any]:
  """Returns the kinds of the layers: five sliding layers, then a full one, repeated."""
  types = tuple("sliding" if (i + 1) % 6 else "full" for i in range(layers))
  return {"layer_types": types, "sliding_window": window}


class Gemma3(Transformer):
  """A Gemma 3 text model; see `Transformer`."""

  config: ModelConfig
