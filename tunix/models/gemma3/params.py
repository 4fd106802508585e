"""Gemma 3 checkpoints: `config.json` and the family.

The tensor names are in the table `transformer.params.DECODER`.
"""

from __future__ import annotations

from typing import Any

from tunix.models.family import Family, presets_of
from tunix.models.gemma import params as gemma_params
from tunix.models.gemma3.model import TEXT_SIZES, Gemma3, ModelConfig
from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.hf import (
  config as hf_config,
  rope as hf_rope,
  values as hf_values,
)

# Fields that gemma's reader must not see: rotary settings are given per kind of layer,
# and transformers' Gemma 3 does not apply the cap.
_READ_HERE = ("rope_parameters", "rope_scaling", "attn_logit_softcapping")

_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0


def config_from_hf(hf: hf_config.HfConfig) -> ModelConfig:
  """Returns the `ModelConfig` of a `config.json` with model_type "gemma3_text".

  Raises:
    ValueError: see `hf_config.decoder_fields`.
  """
  return ModelConfig(**fields_from_hf(hf))


def fields_from_hf(hf: hf_config.HfConfig) -> dict[str, Any]:
  """Returns the arguments of a `ModelConfig`.

  Raises:
    ValueError: see `hf_config.decoder_fields`.
  """
  local_theta = hf_values.number(hf, "rope_local_base_freq", _LOCAL_THETA)
  field = "sliding_window_pattern"
  pattern = hf_values.integer({field: hf.get(field) or 6}, field)
  full, local = hf_rope.read_by_kind(
    hf, hf_values.number(hf, "rope_theta", _GLOBAL_THETA), local_theta
  )
  plain = {"num_key_value_heads": 4, "sliding_window": 4096} | {
    field: value for field, value in hf.items() if field not in _READ_HERE
  }
  fields = gemma_params.gemma2_fields(plain, lambda i: (i + 1) % pattern != 0)
  fields["rope"], fields["local_rope"] = full, local
  return fields


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """Returns the `config.json` of a Gemma 3 text model."""
  hf = hf_config.write_decoder(config, "gemma3_text", "Gemma3ForCausalLM")
  local = config.local_rope or config.rope
  return (
    hf
    | gemma_params.gemma2_to_hf(config)
    | hf_rope.write_by_kind(config)
    | {"rope_local_base_freq": local.theta}
  )


FAMILY = Family(
  name="gemma3",
  model_types=("gemma3_text",),
  config_class=ModelConfig,
  model_class=Gemma3,
  config_from_hf=config_from_hf,
  config_to_hf=config_to_hf,
  presets=presets_of(ModelConfig, *TEXT_SIZES),
)
