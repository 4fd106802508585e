"""gpt-oss: sizes of the published checkpoints, and the class."""

from __future__ import annotations

import dataclasses
from typing import Any

from tunix.models.transformer.config import (
  ClampedGate,
  LayerType,
  MoEConfig,
  RopeConfig,
  TransformerConfig,
  sizes,
)
from tunix.models.transformer.model import Transformer

_ROPE = RopeConfig(
  theta=150_000.0,
  scaling="yarn",
  factor=32.0,
  original_max_position=4096,
  truncate=False,
)
_WIDTH = 2880  # of the residual stream and of an expert


def experts(
  count: int, hidden_dim: int = _WIDTH, per_token: int = 4, **fields: object
) -> MoEConfig:
  """Returns the experts of a gpt-oss model.

  Args:
    count: number of experts E.
    hidden_dim: hidden width F of one expert.
    per_token: number of experts k of each token.
    **fields: further fields of `MoEConfig`.
  """
  return MoEConfig(
    num_experts=count,
    experts_per_token=per_token,
    hidden_dim=hidden_dim,
    routing="chosen",
    bias=True,
    fused_gate=True,
    **{"clamped_gate": ClampedGate(), **fields},
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(TransformerConfig):
  """`TransformerConfig` with the defaults of gpt-oss (arXiv:2508.10925).

  The class methods give the published sizes; keyword arguments override fields:
  `ModelConfig.gpt_oss_20b(param_dtype=jnp.bfloat16)`.
  """

  vocab_size: int = 201_088
  head_dim: int = 64
  norm_eps: float = 1e-5
  rope: RopeConfig = _ROPE
  sliding_window: int | None = 128
  attention_sinks: bool = True
  qkv_bias: bool = True
  o_bias: bool = True
  max_position: int | None = 131_072

  @classmethod
  def gpt_oss_20b(cls, **overrides: Any) -> ModelConfig:
    """gpt-oss 20B (August 2025): 32 experts, 4 of them for each token."""
    return cls(**(_fields(24, 32) | overrides))

  @classmethod
  def gpt_oss_120b(cls, **overrides: Any) -> ModelConfig:
    """gpt-oss 120B (August 2025): 128 experts, 4 of them for each token."""
    return cls(**(_fields(36, 128) | overrides))


def _fields(layers: int, count: int) -> dict[str, Any]:
  types: tuple[LayerType, ...] = tuple(
    "full" if i % 2 else "sliding" for i in range(layers)
  )
  shape = sizes(layers, _WIDTH, _WIDTH, 64, 8, moe=experts(count))
  return shape | {"layer_types": types}


class GptOss(Transformer):
  """A gpt-oss model; see `Transformer`."""

  config: ModelConfig
