"""Phi 3 and 4 checkpoints: `config.json` and the family.

The tensor names are in the table `transformer.params.DECODER`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tunix.models.family import Family, presets_of
from tunix.models.mistral.params import one_window
from tunix.models.phi3.model import ModelConfig, Phi3
from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.hf import config as hf_config, values as hf_values

# transformers' values of absent fields.
_DEFAULTS = {
  "rms_norm_eps": 1e-5,
  "max_position_embeddings": 4096,
  "original_max_position_embeddings": 4096,
}
_TABLES = ("rope_parameters", "rope_scaling")


def config_from_hf(hf: hf_config.HfConfig) -> ModelConfig:
  """Returns the `ModelConfig` of a `config.json` with model_type "phi3".

  A `sliding_window` applies to every layer. One that no sequence of
  `max_position_embeddings` tokens exceeds is ignored, as is null.

  Raises:
    ValueError: see `hf_config.decoder_fields`.
  """
  hf = _DEFAULTS | dict(hf)
  hf_config.check_supported(hf, {"resid_pdrop": (0, None), "embd_pdrop": (0, None)})
  limit = hf_values.integer(hf, "max_position_embeddings")
  if hf.get("sliding_window") is not None:
    window = hf_values.integer(hf, "sliding_window")
    hf["sliding_window"] = window if window < limit else None
  windowed = hf.get("sliding_window") is not None
  plain, partial = _without_partial(hf, limit)
  fields = hf_config.decoder_fields(plain, sliding=lambda i: windowed)
  rope = dataclasses.replace(fields.pop("rope"), partial=partial)
  return ModelConfig(**fields, rope=rope)


def _without_partial(hf: Mapping[str, Any], limit: int) -> tuple[dict[str, Any], float]:
  """Returns the settings without the share of rotated dimensions, and this share.

  The numbers that longrope takes from outside of its table are added to it.

  Args:
    hf: the parsed `config.json`.
    limit: longest sequence in tokens.
  """
  hf = dict(hf)
  partial = hf_values.number(hf, "partial_rotary_factor", 1.0)
  hf.pop("partial_rotary_factor", None)
  for name in _TABLES:
    if not isinstance(hf.get(name), Mapping):
      continue
    table = dict(hf[name])
    partial = hf_values.number(table, "partial_rotary_factor", partial)
    table.pop("partial_rotary_factor", None)
    kind = hf_values.text(table, "rope_type", hf_values.text(table, "type", "default"))
    table.pop("type", None)
    # Older files call longrope "su" or "yarn".
    table["rope_type"] = "longrope" if kind in ("su", "yarn") else kind
    if table["rope_type"] == "longrope":
      original = hf_values.integer(hf, "original_max_position_embeddings")
      table.setdefault("original_max_position_embeddings", original)
      ratio = limit / hf_values.integer(table, "original_max_position_embeddings")
      # A context that is not longer has no factor of queries and keys, like 1.
      table["factor"] = max(1.0, hf_values.number(table, "factor", ratio))
    hf[name] = table
  return hf, partial


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """Returns the `config.json` of a Phi 3 or Phi 4 model.

  Raises:
    ValueError: the layers have different windows.
  """
  hf = hf_config.write_decoder(config, "phi3", "Phi3ForCausalLM")
  partial = {"partial_rotary_factor": config.rope.partial}
  window = one_window(config)
  for name in _TABLES:
    if hf[name] is not None:
      hf[name] = hf[name] | partial
  # transformers' default of the padding is no token of smaller vocabularies.
  hf |= partial | {"sliding_window": window, "pad_token_id": None}
  if config.rope.scaling == "longrope":
    hf["original_max_position_embeddings"] = config.rope.original_max_position
  return hf


FAMILY = Family(
  name="phi3",
  model_types=("phi3",),
  config_class=ModelConfig,
  model_class=Phi3,
  config_from_hf=config_from_hf,
  config_to_hf=config_to_hf,
  presets=presets_of(ModelConfig),
  hub_names={
    "phi-4": "phi4_14b",
    "phi-4-mini-instruct": "phi4_mini_3p8b",
    "phi-4-mini-reasoning": "phi4_mini_3p8b",
  },
)
