"""Mistral checkpoints: `config.json` and the family.

The tensor names are in the table `transformer.params.DECODER`.
"""

from __future__ import annotations

from typing import Any

from tunix.models.family import Family, presets_of
from tunix.models.mistral.model import Mistral, ModelConfig
from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.hf import config as hf_config


def config_from_hf(hf: hf_config.HfConfig) -> ModelConfig:
  """Returns the `ModelConfig` of a `config.json` with model_type "mistral".

  A `sliding_window` applies to every layer; null means no window.

  Raises:
    ValueError: see `hf_config.decoder_fields`.
  """
  # transformers' values of absent fields.
  hf = {"sliding_window": 4096, "num_key_value_heads": 8} | dict(hf)
  windowed = hf["sliding_window"] is not None
  return ModelConfig(**hf_config.decoder_fields(hf, sliding=lambda i: windowed))


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """Returns the `config.json` of a Mistral model.

  Raises:
    ValueError: see `one_window`.
  """
  hf = hf_config.write_decoder(config, "mistral", "MistralForCausalLM")
  return hf | {"sliding_window": one_window(config)}


def one_window(config: TransformerConfig) -> int | None:
  """Returns the window that all layers have; None for no window.

  Raises:
    ValueError: the layers have different windows, which this format cannot express.
  """
  windows = {kind.window for kind in config.kinds}
  if len(windows) > 1:
    raise ValueError(
      "a config.json of this family gives one window to all layers, this model has "
      f"{config.layer_types}: save it as another family"
    )
  return windows.pop()


FAMILY = Family(
  name="mistral",
  model_types=("mistral",),
  config_class=ModelConfig,
  model_class=Mistral,
  config_from_hf=config_from_hf,
  config_to_hf=config_to_hf,
  presets=presets_of(ModelConfig),
  hub_names={
    "mistral-nemo-base-2407": "mistral_nemo_12b",
    "mistral-nemo-instruct-2407": "mistral_nemo_12b",
  },
)
