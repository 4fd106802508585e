"""Ministral 3 checkpoints: `config.json` and the family.

The tensor names are in the table `transformer.params.DECODER`.

The folders on the hub hold a vision tower beside the text model (model_type
"mistral3"). Their text model is read, and saved as a folder of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunix.models.family import Family, presets_of
from tunix.models.ministral3.model import Ministral3, ModelConfig
from tunix.models.mistral import params as mistral_params
from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.hf import config as hf_config, values as hf_values
from tunix.models.transformer.params import HARMLESS

# transformers' values of absent fields.
_DEFAULTS = {
  "vocab_size": 131_072,
  "hidden_size": 4096,
  "intermediate_size": 14_336,
  "num_hidden_layers": 34,
  "num_attention_heads": 32,
  "num_key_value_heads": 8,
  "max_position_embeddings": 262_144,
  "rms_norm_eps": 1e-5,
  "sliding_window": None,
}
_ROPE = {
  "rope_type": "yarn",
  "rope_theta": 1_000_000.0,
  "factor": 16.0,
  "original_max_position_embeddings": 16_384,
  "mscale": 1.0,
  "mscale_all_dim": 1.0,
  "llama_4_scaling_beta": 0.1,
}
_TEXT = "language_model."


def config_from_hf(hf: hf_config.HfConfig) -> ModelConfig:
  """Returns the `ModelConfig` of model_type "ministral3", or of the text of "mistral3".

  Raises:
    ValueError: see `hf_config.decoder_fields`; or the text model is no Ministral 3.
  """
  hf = _text_config(hf)
  spelled = hf_values.table(hf, "rope_scaling") or hf_values.table(
    hf, "rope_parameters"
  )
  hf = _DEFAULTS | hf | ({} if spelled else {"rope_parameters": _ROPE})
  windowed = hf["sliding_window"] is not None
  fields = hf_config.decoder_fields(
    hf | {"layer_types": None}, head_dim=128, sliding=lambda i: windowed
  )
  return ModelConfig(**fields)


def _text_config(hf: hf_config.HfConfig) -> dict[str, Any]:
  """Returns the settings of the text model."""
  text = hf.get("text_config")
  if hf.get("model_type") != "mistral3":
    return dict(hf)
  if not isinstance(text, Mapping) or text.get("model_type") != "ministral3":
    raise ValueError(
      f"text_config is {text!r}; expected the settings of a model of model_type "
      "'ministral3'. Save a text model of another family as a folder of its own"
    )
  outer = ("quantization_config", "tie_word_embeddings", "architectures")
  return {field: hf[field] for field in outer if field in hf} | dict(text)


def canonical_key(key: str) -> str:
  """Returns a tensor's name without the prefixes of a model with a vision tower."""
  key = key.removeprefix("model.") if key.startswith(f"model.{_TEXT}") else key
  if not key.startswith(_TEXT):
    return key
  key = key.removeprefix(_TEXT)
  # One of the spellings has the decoder itself under this prefix.
  return key if key.startswith(("model.", "lm_head.")) else f"model.{key}"


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """Returns the `config.json` of a Ministral 3 text model.

  Raises:
    ValueError: the layers have different windows, which this format cannot express.
  """
  hf = hf_config.write_decoder(config, "ministral3", "Ministral3ForCausalLM")
  del hf["rope_scaling"], hf["rope_theta"]  # transformers reads beta in one place only
  # transformers needs both fields, also for queries that are not scaled.
  scaling = {
    "llama_4_scaling_beta": 0.0,
    "original_max_position_embeddings": config.rope.original_max_position,
  }
  return hf | {
    "rope_parameters": scaling | hf["rope_parameters"],
    "sliding_window": mistral_params.one_window(config),
  }


FAMILY = Family(
  name="ministral3",
  model_types=("ministral3", "mistral3"),
  config_class=ModelConfig,
  model_class=Ministral3,
  config_from_hf=config_from_hf,
  config_to_hf=config_to_hf,
  canonical_key=canonical_key,
  harmless=(*HARMLESS, r"(model\.)?(vision_tower|multi_modal_projector)\..*"),
  presets=presets_of(ModelConfig),
  hub_names={
    f"ministral-3-{size}-{kind}-2512": f"ministral3_{size}"
    for size in ("3b", "8b", "14b")
    for kind in ("base", "instruct", "reasoning")
  },
)
