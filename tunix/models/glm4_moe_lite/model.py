"""GLM-4.7 Flash: the size of the published checkpoint, and the class."""

from __future__ import annotations

import dataclasses
from typing import Any

from tunix.models.transformer.config import (
  MLAConfig,
  MoEConfig,
  RopeConfig,
  TransformerConfig,
  sizes,
)
from tunix.models.transformer.model import Transformer

_ROPE = RopeConfig(theta=1_000_000.0)
_MLA = MLAConfig(kv_rank=512, q_rank=768, nope_dim=192, rope_dim=64, value_dim=256)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(TransformerConfig):
  """`TransformerConfig` with the defaults of GLM-4 MoE lite.

  The class methods give the published sizes; keyword arguments override fields:
  `ModelConfig.glm4p7_flash(param_dtype=jnp.bfloat16)`.
  """

  vocab_size: int = 154_880
  head_dim: int = 256
  norm_eps: float = 1e-5
  rope: RopeConfig = _ROPE
  max_position: int | None = 202_752

  @classmethod
  def glm4p7_flash(cls, **overrides: Any) -> ModelConfig:
    """GLM-4.7 Flash 30B-A3B (January 2026), without its layer for further tokens."""
    moe = MoEConfig(
      num_experts=64,
      experts_per_token=4,
      hidden_dim=1536,
      routing="sigmoid",
      scale=1.8,
      shared_hidden_dim=1536,
      dense_layers=(0,),
    )
    return cls(**(sizes(47, 2048, 10_240, 20, 20, moe=moe, mla=_MLA) | overrides))


class Glm4MoeLite(Transformer):
  """A GLM-4 MoE lite model; see `Transformer`."""

  config: ModelConfig
