"""Qwen 2 in Hugging Face's words."""

from __future__ import annotations

from typing import Any

from tunix.models.qwen2.model import ModelConfig
from tunix.models.transformer import hf_config, params
from tunix.models.transformer.config import TransformerConfig

NAMES: params.NameTable = params.DECODER


def config_from_hf(hf: hf_config.HfConfig) -> ModelConfig:
  """`ModelConfig` of a `config.json` with model_type "qwen2".

  Raises:
    ValueError: see `hf_config.decoder_fields`.
  """
  fields = hf_config.decoder_fields(hf, sliding=qwen_sliding(hf))
  fields["qkv_bias"], fields["o_bias"] = True, False
  return ModelConfig(**fields)


def qwen_sliding(hf: hf_config.HfConfig) -> hf_config.IsSliding | None:
  """Sliding windows as Qwen's configs say it: off, or on from some layer upwards.

  Raises:
    ValueError: `max_window_layers` is no whole number.
  """
  if not hf.get("use_sliding_window"):
    return None
  first = hf_config.integer({"max_window_layers": 28} | dict(hf), "max_window_layers")
  return lambda i: i >= first


def qwen_layers_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """The same, written."""
  layers = hf_config.write_layers(config)
  sliding = [kind != "full_attention" for kind in layers["layer_types"]]
  return layers | {
    "use_sliding_window": any(sliding),
    "max_window_layers": sliding.index(True) if any(sliding) else config.num_layers,
  }


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """The `config.json` of a Qwen 2 model."""
  hf = hf_config.write_decoder(config, "qwen2", "Qwen2ForCausalLM")
  return hf | qwen_layers_to_hf(config)
