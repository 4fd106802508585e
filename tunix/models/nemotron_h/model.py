"""Nemotron-H: sizes of the published checkpoints, and the class."""

from __future__ import annotations

import dataclasses
from typing import Any

from tunix.models.transformer.config import (
  Activation,
  LayerType,
  Mamba2Config,
  MoEConfig,
  TransformerConfig,
  TypeFields,
  fields_by_type,
  sizes,
)
from tunix.models.transformer.model import Transformer

# Letters of `hybrid_override_pattern`: Mamba-2, MLP, experts, attention without
# positions.
PATTERN: dict[str, LayerType] = {"M": "linear", "-": "none", "E": "none", "*": "nope"}

# Layers of one part each, see `TransformerConfig.parts`.
PARTS = {"linear": "mixer", "none": "mlp", "nope": "mixer"}


def layer_fields(types: tuple[LayerType, ...], mixer: Mamba2Config) -> TypeFields:
  """Returns `TransformerConfig.type_fields` of layers of one part."""
  own: dict[str, dict[str, Any]] = {
    name: {"parts": PARTS[name]} for name in dict.fromkeys(types)
  }
  if "linear" in own:
    own["linear"]["mixer"] = mixer
  return fields_by_type(**own)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(TransformerConfig):
  """`TransformerConfig` with Nemotron-H's defaults.

  The class methods give the published sizes; keyword arguments override fields:
  `ModelConfig.nemotron_nano_9b_v2(param_dtype=jnp.bfloat16)`.
  """

  vocab_size: int = 131_072
  head_dim: int = 128
  norm_eps: float = 1e-5
  activation: Activation = "relu2"
  gated_mlp: bool = False
  max_position: int | None = 131_072

  @classmethod
  def nemotron_nano_9b_v2(cls, **overrides: Any) -> ModelConfig:
    """Nemotron Nano 9B v2 (August 2025): 27 Mamba-2, 25 MLP and 4 attention layers."""
    pattern = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
    types: tuple[LayerType, ...] = tuple(PATTERN[letter] for letter in pattern)
    mixer = Mamba2Config(
      num_heads=128, head_dim=80, state_dim=128, groups=8, least_step=0.001
    )
    fields = sizes(56, 4480, 15680, 40, 8, layer_types=types)
    fields["type_fields"] = layer_fields(types, mixer)
    return cls(**(fields | overrides))

  @classmethod
  def nemotron3_nano_30b_a3b(cls, **overrides: Any) -> ModelConfig:
    """Nemotron 3 Nano (December 2025): 23 Mamba-2, 23 expert and 6 attention layers."""
    pattern = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    types: tuple[LayerType, ...] = tuple(PATTERN[letter] for letter in pattern)
    mixer = Mamba2Config(
      num_heads=64, head_dim=64, state_dim=128, groups=8, least_step=0.001
    )
    moe = MoEConfig(
      num_experts=128,
      experts_per_token=6,
      hidden_dim=1856,
      routing="sigmoid",
      scale=2.5,
      shared_hidden_dim=3712,
    )
    fields = sizes(52, 2688, 1856, 32, 2, layer_types=types, moe=moe)
    fields["type_fields"] = layer_fields(types, mixer)
    fields["max_position"] = 262_144
    return cls(**(fields | overrides))


class NemotronH(Transformer):
  """A Nemotron-H model; see `Transformer`."""

  config: ModelConfig
