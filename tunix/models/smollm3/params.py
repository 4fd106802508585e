"""SmolLM3 checkpoints: `config.json` and the family.

The tensor names are in the table `transformer.params.DECODER`.
"""

from __future__ import annotations

from typing import Any

from tunix.models.family import Family, presets_of
from tunix.models.smollm3.model import ModelConfig, SmolLM3
from tunix.models.transformer.config import LayerType, TransformerConfig
from tunix.models.transformer.hf import config as hf_config, values as hf_values

# transformers' values of absent fields.
_DEFAULTS = {"num_key_value_heads": 4, "rope_theta": 2_000_000.0}


def config_from_hf(hf: hf_config.HfConfig) -> ModelConfig:
  """Returns the `ModelConfig` of a `config.json` with model_type "smollm3".

  Raises:
    ValueError: see `hf_config.decoder_fields`; or `no_rope_layers` does not name every
      layer.
  """
  hf = _DEFAULTS | dict(hf)
  fields = hf_config.decoder_fields(hf, tied=True)
  rotates = _rotates(hf, fields["num_layers"])
  types: tuple[LayerType, ...] = tuple("full" if r else "nope" for r in rotates)
  if "nope" in types:
    fields["layer_types"] = types
  return ModelConfig(**fields)


def _rotates(hf: hf_config.HfConfig, layers: int) -> list[bool]:
  """Returns True for each layer with rotary embedding."""
  named = hf.get("no_rope_layers")  # despite the name, 1 stands for rotary embedding
  if named is None:
    interval = hf_values.integer(
      {"no_rope_layer_interval": 4} | dict(hf), "no_rope_layer_interval"
    )
    return [(i + 1) % interval != 0 for i in range(layers)]
  if not isinstance(named, list) or len(named) < layers:
    raise ValueError(
      f"no_rope_layers is {named!r}; expected a list with 0 or 1 for each of the "
      f"{layers} layers. Correct config.json"
    )
  return [
    hf_values.flag({"no_rope_layers": x}, "no_rope_layers") for x in named[:layers]
  ]


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """Returns the `config.json` of a SmolLM3 model."""
  hf = hf_config.write_decoder(config, "smollm3", "SmolLM3ForCausalLM")
  types = config.layer_types or ("full",) * config.num_layers
  return hf | {
    "mlp_bias": False,
    "use_sliding_window": False,
    "no_rope_layers": [int(kind != "nope") for kind in types],
  }


FAMILY = Family(
  name="smollm3",
  model_types=("smollm3",),
  config_class=ModelConfig,
  model_class=SmolLM3,
  config_from_hf=config_from_hf,
  config_to_hf=config_to_hf,
  presets=presets_of(ModelConfig),
)
