"""Mistral in Hugging Face's words."""

from __future__ import annotations

from typing import Any

from tunix.models.mistral.model import ModelConfig
from tunix.models.transformer import hf_config, params
from tunix.models.transformer.config import TransformerConfig

NAMES: params.NameTable = params.DECODER


def config_from_hf(hf: hf_config.HfConfig) -> ModelConfig:
  """`ModelConfig` of a `config.json` with model_type "mistral".

  A `sliding_window` holds in every layer; null means that there is none.

  Raises:
    ValueError: see `hf_config.decoder_fields`.
  """
  # What absent fields mean.
  hf = {"sliding_window": 4096, "num_key_value_heads": 8} | dict(hf)
  windowed = hf["sliding_window"] is not None
  return ModelConfig(**hf_config.decoder_fields(hf, sliding=lambda i: windowed))


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """The `config.json` of a Mistral model.

  Raises:
    ValueError: some layers slide and others do not, which this format cannot say.
  """
  hf = hf_config.write_decoder(config, "mistral", "MistralForCausalLM")
  windows = {kind.window for kind in config.kinds}
  if len(windows) > 1:
    raise ValueError(
      "a mistral config.json gives one window to all layers, this model has "
      f"{config.layer_types}: save it as another family"
    )
  return hf | {"sliding_window": windows.pop()}
