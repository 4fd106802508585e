"""OLMo 3: sizes of the published checkpoints, and the class."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from tunix.models.transformer.config import RopeConfig, TransformerConfig, sizes
from tunix.models.transformer.model import Transformer

_LOCAL = RopeConfig(theta=500_000.0)
_LONG = RopeConfig(
  theta=500_000.0, scaling="yarn", factor=8.0, original_max_position=8192
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(TransformerConfig):
  """`TransformerConfig` with OLMo 3's defaults.

  The class methods give the published sizes; keyword arguments override fields:
  `ModelConfig.olmo3_7b(param_dtype=jnp.bfloat16)`.
  """

  vocab_size: int = 100_278
  head_dim: int = 128
  norms: Literal["pre", "post", "both"] = "post"
  qk_norm: Literal["head", "all"] | None = "all"
  rope: RopeConfig = _LONG
  local_rope: RopeConfig | None = _LOCAL
  sliding_window: int | None = 4096
  max_position: int | None = 65_536

  @classmethod
  def olmo3_7b(cls, **overrides: Any) -> ModelConfig:
    """OLMo 3 7B (November 2025)."""
    fields = sizes(32, 4096, 11008, 32, 32, layer_types=_pattern(32))
    return cls(**(fields | overrides))

  @classmethod
  def olmo3_32b(cls, **overrides: Any) -> ModelConfig:
    """OLMo 3 32B (November 2025)."""
    fields = sizes(64, 5120, 27648, 40, 8, layer_types=_pattern(64))
    return cls(**(fields | overrides))


def _pattern(layers: int) -> tuple[str, ...]:
  """Returns the kinds of the layers: three sliding layers, then a full one."""
  return tuple("sliding" if (i + 1) % 4 else "full" for i in range(layers))


class Olmo3(Transformer):
  """An OLMo 3 model; see `Transformer`."""

  config: ModelConfig
