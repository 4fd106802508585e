"""Granite checkpoints: `config.json` and the family.

The tensor names are in the table `transformer.params.DECODER`.
"""

from __future__ import annotations

from typing import Any

from tunix.models.family import Family, presets_of
from tunix.models.granite.model import Granite, ModelConfig
from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.hf import config as hf_config, values as hf_values


def config_from_hf(hf: hf_config.HfConfig) -> ModelConfig:
  """Returns the `ModelConfig` of a `config.json` with model_type "granite".

  Raises:
    ValueError: see `hf_config.decoder_fields`.
  """
  return ModelConfig(**hf_config.decoder_fields(hf), **read_factors(hf))


def read_factors(hf: hf_config.HfConfig) -> dict[str, Any]:
  """Returns the arguments of a `TransformerConfig` with Granite's factors."""

  def multiplier(name):
    return hf_values.number(hf, name, 1.0)

  embedding = multiplier("embedding_multiplier")
  return {
    "query_scale": multiplier("attention_multiplier"),
    "embedding_multiplier": None if embedding == 1 else embedding,
    "residual_multiplier": multiplier("residual_multiplier"),
    "logits_divisor": multiplier("logits_scaling"),
  }


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """Returns the `config.json` of a Granite model."""
  hf = hf_config.write_decoder(config, "granite", "GraniteForCausalLM")
  return hf | {"mlp_bias": False} | write_factors(config)


def write_factors(config: TransformerConfig) -> dict[str, Any]:
  """Returns the fields of Granite's factors."""
  scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
  return {
    "attention_multiplier": scale,
    "embedding_multiplier": config.embedding_multiplier or 1.0,
    "residual_multiplier": config.residual_multiplier,
    "logits_scaling": config.logits_divisor,
  }


FAMILY = Family(
  name="granite",
  model_types=("granite",),
  config_class=ModelConfig,
  model_class=Granite,
  config_from_hf=config_from_hf,
  config_to_hf=config_to_hf,
  presets=presets_of(ModelConfig),
)
