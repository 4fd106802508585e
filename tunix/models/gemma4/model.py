"""Gemma 4: sizes of the published checkpoints, and the class."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from tunix.models.transformer.config import (
  Activation,
  MoEConfig,
  RopeConfig,
  TransformerConfig,
  fields_by_type,
  sizes,
)
from tunix.models.transformer.model import Transformer

_GLOBAL = RopeConfig(theta=1_000_000.0, scaling="proportional", partial=0.25)
_LOCAL = RopeConfig(theta=10_000.0)


def experts(count: int, hidden_dim: int, per_token: int) -> MoEConfig:
  """Returns the experts of a Gemma 4 model.

  Args:
    count: number of experts E.
    hidden_dim: hidden width F of one expert.
    per_token: number of experts k of each token.
  """
  return MoEConfig(
    num_experts=count,
    experts_per_token=per_token,
    hidden_dim=hidden_dim,
    fused_gate=True,
    fused_halves=True,
    beside_mlp=True,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(TransformerConfig):
  """`TransformerConfig` with the defaults of Gemma 4.

  The class methods give the published sizes; keyword arguments override fields:
  `ModelConfig.gemma4_e2b(param_dtype=jnp.bfloat16)`.
  """

  vocab_size: int = 262_144
  head_dim: int = 256
  norms: Literal["pre", "post", "both"] = "both"
  activation: Activation = "gelu_tanh"
  rope: RopeConfig = _GLOBAL
  local_rope: RopeConfig | None = _LOCAL
  grouped_layers: Literal["all", "sliding"] = "sliding"
  query_scale: float | None = 1.0
  final_softcap: float | None = 30.0
  tie_embeddings: bool = True
  scale_embeddings: bool = True
  qk_norm: Literal["head", "all"] | None = "head"
  value_norm: bool = True
  layer_scalars: bool = True
  max_position: int | None = 131_072

  @classmethod
  def gemma4_e2b(cls, **overrides: Any) -> ModelConfig:
    """Gemma 4 E2B: 20 of 35 layers read the keys of an earlier one."""
    fields = sizes(35, 1536, 6144, 8, 1, shared_kv_layers=20)
    fields |= {"layer_input_dim": 256, "shared_kv_hidden_dim": 2 * 6144}
    return cls(**(fields | _pattern(35, 5, 512) | overrides))

  @classmethod
  def gemma4_e4b(cls, **overrides: Any) -> ModelConfig:
    """Gemma 4 E4B: 18 of 42 layers read the keys of an earlier one."""
    fields = sizes(42, 2560, 10_240, 8, 2, shared_kv_layers=18, layer_input_dim=256)
    return cls(**(fields | _pattern(42, 6, 512) | overrides))

  @classmethod
  def gemma4_31b(cls, **overrides: Any) -> ModelConfig:
    """Gemma 4 31B: one map for keys and values in full layers."""
    fields = sizes(60, 5376, 21_504, 32, 16, max_position=262_144)
    return cls(**(fields | _pattern(60, 6, 1024, _joint(4)) | overrides))

  @classmethod
  def gemma4_26b_a4b(cls, **overrides: Any) -> ModelConfig:
    """Gemma 4 26B-A4B: 128 experts beside the MLP, 8 of them for each token."""
    fields = sizes(30, 2816, 2112, 16, 8, max_position=262_144)
    fields["moe"] = experts(128, 704, 8)
    return cls(**(fields | _pattern(30, 6, 1024, _joint(2)) | overrides))

  gemma4_26b_a4b_it = gemma4_26b_a4b
  gemma4_e2b_it = gemma4_e2b
  gemma4_e4b_it = gemma4_e4b
  gemma4_31b_it = gemma4_31b


def _joint(kv_heads: int) -> dict[str, Any]:
  """Returns the fields of full layers whose values are their keys' projections."""
  return {"num_kv_heads": kv_heads, "values_from_keys": True}


def _pattern(
  layers: int, period: int, window: int, full: dict[str, Any] | None = None
) -> dict[str, Any]:
  """Returns the kinds of the layers: one full layer ends each period of sliding ones.

  Args:
    layers: number of layers.
    period: number of layers of a period.
    window: number of keys that a query of a sliding layer attends to.
    full: further fields of the full layers.
  """
  types = tuple("sliding" if (i + 1) % period else "full" for i in range(layers))
  return {
    "layer_types": types,
    "sliding_window": window,
    "type_fields": fields_by_type(full={"head_dim": 512, **(full or {})}),
  }


class Gemma4(Transformer):
  """A Gemma 4 text model; see `Transformer`."""

  config: ModelConfig
