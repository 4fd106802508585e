"""Gemma 3 checkpoints: `config.json`, tensor names and the family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunix.models.family import Family, presets_of
from tunix.models.gemma import params as gemma_params
from tunix.models.gemma3.model import TEXT_SIZES, Gemma3, ModelConfig
from tunix.models.transformer import hf_config
from tunix.models.transformer.config import RopeConfig, TransformerConfig

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
  pattern = hf_config.integer({"n": hf.get("sliding_window_pattern") or 6}, "n")
  full, local = _read_ropes(hf)
  plain = {"num_key_value_heads": 4, "sliding_window": 4096} | {
    field: value for field, value in hf.items() if field not in _READ_HERE
  }
  fields = gemma_params.gemma2_fields(plain, lambda i: (i + 1) % pattern != 0)
  fields["rope"], fields["local_rope"] = full, local
  return fields


def _read_ropes(hf: hf_config.HfConfig) -> tuple[RopeConfig, RopeConfig]:
  """Returns the rotary settings of full and of sliding layers, in either spelling."""
  both = hf.get("rope_parameters") or {}
  if not isinstance(both, Mapping):
    raise ValueError(f"rope_parameters is {both!r}, expected a table by kind of layer")
  full = dict(both.get("full_attention") or {}) | dict(hf.get("rope_scaling") or {})
  local = dict(both.get("sliding_attention") or {})
  theta = hf_config.number(hf, "rope_theta", _GLOBAL_THETA)
  local_theta = hf_config.number(hf, "rope_local_base_freq", _LOCAL_THETA)
  return (
    hf_config.rope_of(full, hf_config.number(full, "rope_theta", theta)),
    hf_config.rope_of(local, hf_config.number(local, "rope_theta", local_theta)),
  )


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """Returns the `config.json` of a Gemma 3 text model."""
  hf = hf_config.write_decoder(config, "gemma3_text", "Gemma3ForCausalLM")
  local = config.local_rope or config.rope
  scaling = hf_config.scaling_fields
  by_kind = {
    "full_attention": scaling(config.rope) | {"rope_theta": config.rope.theta},
    "sliding_attention": scaling(local) | {"rope_theta": local.theta},
  }
  return (
    hf
    | gemma_params.gemma2_to_hf(config)
    | {"rope_parameters": by_kind, "rope_local_base_freq": local.theta}
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
