"""OLMo 3 checkpoints: `config.json` and the family.

The tensor names are in the table `transformer.params.DECODER`.
"""

from __future__ import annotations

from typing import Any

from tunix.models.family import Family, presets_of
from tunix.models.olmo3.model import ModelConfig, Olmo3
from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.hf import (
  config as hf_config,
  rope as hf_rope,
  values as hf_values,
)

# transformers' values of absent fields.
_DEFAULTS = {"rms_norm_eps": 1e-5, "sliding_window": 4096}
_THETA = 500_000.0


def config_from_hf(hf: hf_config.HfConfig) -> ModelConfig:
  """Returns the `ModelConfig` of a `config.json` with model_type "olmo3".

  Raises:
    ValueError: see `hf_config.decoder_fields`.
  """
  theta = hf_values.number(hf, "rope_theta", _THETA)
  # As in transformers, `rope_theta` is the base of full layers only.
  full, local = hf_rope.read_by_kind(hf, theta, _THETA)
  plain = _DEFAULTS | {key: hf[key] for key in hf if not key.startswith("rope_")}
  fields = hf_config.decoder_fields(plain, sliding=lambda i: (i + 1) % 4 != 0)
  fields["rope"], fields["local_rope"] = full, local
  return ModelConfig(**fields)


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """Returns the `config.json` of an OLMo 3 model."""
  hf = hf_config.write_decoder(config, "olmo3", "Olmo3ForCausalLM")
  del hf["rope_scaling"], hf["rope_theta"]  # the older spelling, of one kind of layer
  return hf | hf_config.write_layers(config) | hf_rope.write_by_kind(config)


FAMILY = Family(
  name="olmo3",
  model_types=("olmo3",),
  config_class=ModelConfig,
  model_class=Olmo3,
  config_from_hf=config_from_hf,
  config_to_hf=config_to_hf,
  presets=presets_of(ModelConfig),
  # These names have a date before the size.
  hub_names={
    "olmo-3-1025-7b": "olmo3_7b",
    "olmo-3-1125-32b": "olmo3_32b",
    "olmo-3-7b-instruct": "olmo3_7b",
    "olmo-3-7b-think": "olmo3_7b",
    "olmo-3-32b-think": "olmo3_32b",
  },
)
