"""DeepSeek-V3: the size of the published checkpoints, and the class."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tunix.models.transformer.config import (
  MLAConfig,
  MoEConfig,
  RopeConfig,
  TransformerConfig,
  sizes,
)
from tunix.models.transformer.model import Transformer

_FACTOR = 40.0
_ROPE = RopeConfig(
  scaling="yarn",
  factor=_FACTOR,
  original_max_position=4096,
  mscale=1.0,
  mscale_all_dim=1.0,
)
_MLA = MLAConfig(kv_rank=512, q_rank=1536, nope_dim=128, rope_dim=64, value_dim=128)
# YaRN scales the scores of latent attention, by the square of its factor of one vector.
_SCALE = _MLA.query_dim**-0.5 * (0.1 * math.log(_FACTOR) + 1) ** 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(TransformerConfig):
  """`TransformerConfig` with the defaults of DeepSeek-V3 (arXiv:2412.19437).

  The class method gives the published size; keyword arguments override fields:
  `ModelConfig.deepseek_v3_671b(param_dtype=jnp.bfloat16)`.
  """

  vocab_size: int = 129_280
  head_dim: int = 192

  @classmethod
  def deepseek_v3_671b(cls, **overrides: Any) -> ModelConfig:
    """DeepSeek-V3 and R1 (December 2024), without the layer for further tokens."""
    moe = MoEConfig(
      num_experts=256,
      experts_per_token=8,
      hidden_dim=2048,
      routing="sigmoid",
      groups=8,
      groups_used=4,
      scale=2.5,
      shared_hidden_dim=2048,
      dense_layers=(0, 1, 2),
    )
    fields = sizes(61, 7168, 18_432, 128, 128, moe=moe, mla=_MLA, rope=_ROPE)
    return cls(
      **(fields | {"query_scale": _SCALE, "max_position": 163_840} | overrides)
    )


class DeepseekV3(Transformer):
  """A DeepSeek-V3 model; see `Transformer`."""

  config: ModelConfig
