"""Gemma 1 and 2 checkpoints: `config.json` and the family.

The tensor names are in the table `transformer.params.DECODER`.
"""

from __future__ import annotations

from typing import Any

from tunix.models.family import Family, presets_of
from tunix.models.gemma.model import Gemma, ModelConfig
from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.hf import config as hf_config, values as hf_values


def config_from_hf(hf: hf_config.HfConfig) -> ModelConfig:
  """Returns the `ModelConfig` of a `config.json` with model_type "gemma" or "gemma2".

  Raises:
    ValueError: see `hf_config.decoder_fields`.
  """
  if hf.get("model_type") == "gemma2":
    hf = _GEMMA2_DEFAULTS | dict(hf)
    return ModelConfig(**gemma2_fields(hf, lambda i: i % 2 == 0))
  hf = {"num_key_value_heads": 16} | dict(hf)
  if hf.get("hidden_act") in (None, "gelu"):
    # Gemma 1's files name "gelu", but the models were trained with its tanh form.
    hf["hidden_act"] = "gelu_pytorch_tanh"
  return ModelConfig(**hf_config.decoder_fields(hf, head_dim=256, tied=True))


def gemma2_fields(
  hf: hf_config.HfConfig, sliding: hf_config.IsSliding
) -> dict[str, Any]:
  """Returns the arguments of a configuration with double norms and soft caps.

  Args:
    hf: the parsed `config.json`.
    sliding: returns True if layer i has a sliding window, used if `layer_types` is
      absent.

  Raises:
    ValueError: see `hf_config.decoder_fields`.
  """
  activation = hf_values.text(hf, "hidden_activation", "gelu_pytorch_tanh")
  named = dict(hf) | {"hidden_act": activation}
  fields = hf_config.decoder_fields(named, head_dim=256, tied=True, sliding=sliding)
  scalar = hf_values.number(hf, "query_pre_attn_scalar", 256.0)
  for field, hf_field in _CAPS.items():
    if hf.get(hf_field) is not None:
      fields[field] = hf_values.number(hf, hf_field)
  return fields | {
    "norms": "both",
    "query_scale": scalar**-0.5,
  }


# transformers' values of absent fields; null means no cap and no window.
_GEMMA2_DEFAULTS = {
  "num_key_value_heads": 4,
  "sliding_window": 4096,
  "attn_logit_softcapping": 50.0,
  "final_logit_softcapping": 30.0,
}
_CAPS = {
  "attention_softcap": "attn_logit_softcapping",
  "final_softcap": "final_logit_softcapping",
}


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """Returns the `config.json` of a Gemma model; norms="both" means Gemma 2."""
  if config.norms == "both":
    hf = hf_config.write_decoder(config, "gemma2", "Gemma2ForCausalLM")
    return hf | gemma2_to_hf(config)
  hf = hf_config.write_decoder(config, "gemma", "GemmaForCausalLM")
  return hf | {"hidden_activation": hf["hidden_act"]}


def gemma2_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """Returns the fields that Gemma 2 and 3 have beyond Gemma 1's."""
  scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
  scalar = scale**-2
  return {
    "hidden_activation": hf_config.write_activation(config.activation),
    "query_pre_attn_scalar": round(scalar) if abs(scalar % 1 - 0.5) > 0.499 else scalar,
    "attn_logit_softcapping": config.attention_softcap,
    "final_logit_softcapping": config.final_softcap,
    **hf_config.write_layers(config),
  }


FAMILY = Family(
  name="gemma",
  model_types=("gemma", "gemma2"),
  config_class=ModelConfig,
  model_class=Gemma,
  config_from_hf=config_from_hf,
  config_to_hf=config_to_hf,
  presets=presets_of(ModelConfig),
)
