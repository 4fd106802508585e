"""Qwen 2 checkpoints: `config.json` and the family.

The tensor names are in the table `transformer.params.DECODER`.
"""

from __future__ import annotations

from typing import Any

from tunix.models.family import Family, presets_of
from tunix.models.qwen2.model import ModelConfig, Qwen2
from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.hf import config as hf_config, values as hf_values
from tunix.utils import checks


def config_from_hf(hf: hf_config.HfConfig) -> ModelConfig:
  """Returns the `ModelConfig` of a `config.json` with model_type "qwen2".

  Raises:
    ValueError: see `hf_config.decoder_fields`.
  """
  fields = hf_config.decoder_fields(hf, sliding=qwen_sliding(hf))
  fields["qkv_bias"], fields["o_bias"] = True, False
  return ModelConfig(**fields)


def qwen_sliding(hf: hf_config.HfConfig) -> hf_config.IsSliding | None:
  """Returns which layers slide in Qwen's files: none, or all from some layer upwards.

  Raises:
    ValueError: `max_window_layers` is no whole number.
  """
  if not hf_values.flag(hf, "use_sliding_window"):
    return None
  field = "max_window_layers"
  first = hf_values.integer({field: 28} | dict(hf), field, checks.NOT_NEGATIVE)
  return lambda i: i >= first


def qwen_layers_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """Returns the fields of Qwen's files that describe sliding windows."""
  layers = hf_config.write_layers(config)
  sliding = [kind != "full_attention" for kind in layers["layer_types"]]
  return layers | {
    "use_sliding_window": any(sliding),
    "max_window_layers": sliding.index(True) if any(sliding) else config.num_layers,
  }


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """Returns the `config.json` of a Qwen 2 model."""
  hf = hf_config.write_decoder(config, "qwen2", "Qwen2ForCausalLM")
  return hf | qwen_layers_to_hf(config)


FAMILY = Family(
  name="qwen2",
  model_types=("qwen2",),
  config_class=ModelConfig,
  model_class=Qwen2,
  config_from_hf=config_from_hf,
  config_to_hf=config_to_hf,
  presets=presets_of(ModelConfig),
)
