"""Qwen3.5 checkpoints: `config.json`, tensor names and the family.

The folders on the hub hold a vision tower and layers that predict further tokens (MTP)
beside the text model (model_type "qwen3_5"). Their text model is read, and saved as a
folder of its own (model_type "qwen3_5_text").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tunix.models.family import Family, presets_of
from tunix.models.qwen3_5.model import ModelConfig, Qwen3p5, pattern
from tunix.models.transformer.config import (
  DeltaNetConfig,
  LayerType,
  RopeConfig,
  TransformerConfig,
  fields_by_type,
)
from tunix.models.transformer.hf import config as hf_config, rope as hf_rope
from tunix.models.transformer.hf.values import integer, layers, number
from tunix.models.transformer.params import (
  DECODER,
  HARMLESS,
  HfName,
  MTPNames,
  NameTable,
)

# transformers' values of absent fields.
_DEFAULTS = {
  "vocab_size": 248_320,
  "hidden_size": 4096,
  "intermediate_size": 12_288,
  "num_hidden_layers": 32,
  "num_attention_heads": 16,
  "num_key_value_heads": 4,
  "max_position_embeddings": 32_768,
  "linear_conv_kernel_dim": 4,
  "linear_key_head_dim": 128,
  "linear_value_head_dim": 128,
  "linear_num_key_heads": 16,
  "linear_num_value_heads": 32,
}
_PARTIAL = 0.25
_LAYER_TYPES: Mapping[str, LayerType] = {
  "linear_attention": "linear",
  "full_attention": "full",
}
# Numbers of frequency pairs that turn with time, height and width. All three positions
# of a text token are equal, so a text model does not depend on them.
_SECTIONS = (11, 11, 10)

_MIXER = "model.layers.{i}.linear_attn."
NAMES: NameTable = {
  **DECODER,
  **{
    f"layers.attn.{name}.kernel": HfName(f"{_MIXER}{name}.weight", transpose=True)
    for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
  },
  "layers.attn.conv_kernel": HfName(f"{_MIXER}conv1d.weight"),
  "layers.attn.dt_bias": HfName(f"{_MIXER}dt_bias"),
  "layers.attn.a_log": HfName(f"{_MIXER}A_log"),
  "layers.attn.norm.scale": HfName(f"{_MIXER}norm.weight"),
}


MTP = MTPNames(
  count="mtp_num_hidden_layers",
  prefix="mtp.",
  layer="mtp.layers.0.",
  embed_norm="mtp.pre_fc_norm_embedding",
  hidden_norm="mtp.pre_fc_norm_hidden",
  join="mtp.fc",
  norm="mtp.norm",
)
IGNORED = (*HARMLESS, r"model\.visual\..*")  # the tower of images


def config_from_hf(hf: hf_config.HfConfig) -> ModelConfig:
  """Returns the `ModelConfig` of "qwen3_5_text", or of the text model of "qwen3_5".

  Raises:
    ValueError: see `hf_config.decoder_fields`; or a type of layer is unknown.
  """
  return ModelConfig(**decoder_fields(_DEFAULTS | text_config(hf)))


def decoder_fields(hf: hf_config.HfConfig) -> dict[str, Any]:
  """Returns the arguments of a `TransformerConfig`, given the text model's settings.

  Raises:
    ValueError: see `config_from_hf`.
  """
  rope, plain = _read_rope(hf)
  fields = hf_config.decoder_fields(plain | {"layer_types": None}, head_dim=256)
  types = _read_types(hf)
  fields |= {"rope": rope, "layer_types": types}
  if "linear" in types:
    fields["type_fields"] = fields_by_type(linear={"mixer": _read_mixer(hf)})
  return fields


def text_config(hf: hf_config.HfConfig) -> dict[str, Any]:
  """Returns the settings of the text model.

  Raises:
    ValueError: a folder with a tower of images has no settings of its text model.
  """
  kind = str(hf.get("model_type"))
  if kind.endswith("_text"):
    return dict(hf)
  text = hf.get("text_config")
  if not isinstance(text, Mapping):
    raise ValueError(
      f"text_config is {text!r}; expected the settings of a model of model_type "
      f"'{kind}_text'. Correct config.json"
    )
  outer = ("quantization_config", "architectures")
  # transformers writes its default of `tie_word_embeddings` into the section, too.
  whole = {k: hf[k] for k in ("tie_word_embeddings",) if hf.get(k) is not None}
  return {field: hf[field] for field in outer if field in hf} | dict(text) | whole


def _read_rope(hf: Mapping[str, Any]) -> tuple[RopeConfig, dict[str, Any]]:
  """Returns the rotary embedding, and the settings without its share of a head."""
  share, plain = number(hf, "partial_rotary_factor", _PARTIAL), dict(hf)
  plain.pop("partial_rotary_factor", None)
  for table in ("rope_parameters", "rope_scaling"):
    if isinstance(values := plain.get(table), Mapping):
      share = number(values, "partial_rotary_factor", share)
      plain[table] = {k: v for k, v in values.items() if k != "partial_rotary_factor"}
  return dataclasses.replace(hf_rope.read_rope(plain), partial=share), plain


def _read_types(hf: Mapping[str, Any]) -> tuple[LayerType, ...]:
  named = hf.get("layer_types")
  if named is None:
    field = "full_attention_interval"
    return pattern(layers(hf), integer({field: hf.get(field) or 4}, field))
  if not isinstance(named, list) or not set(map(str, named)) <= set(_LAYER_TYPES):
    raise ValueError(
      f"layer_types is {named!r}, expected a list of {sorted(_LAYER_TYPES)}: correct "
      "config.json"
    )
  return tuple(_LAYER_TYPES[name] for name in named)


def _read_mixer(hf: Mapping[str, Any]) -> DeltaNetConfig:
  return DeltaNetConfig(
    num_heads=integer(hf, "linear_num_value_heads"),
    num_key_heads=integer(hf, "linear_num_key_heads"),
    head_dim=integer(hf, "linear_value_head_dim"),
    key_dim=integer(hf, "linear_key_head_dim"),
    conv_taps=integer(hf, "linear_conv_kernel_dim"),
  )


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """Returns the `config.json` of a Qwen3.5 text model.

  Raises:
    ValueError: the model has layers that are neither attention nor gated delta nets.
  """
  scores = "" if config.num_scores is None else "Text"
  return write_decoder(config, "qwen3_5_text", f"Qwen3_5{scores}ForCausalLM")


def write_decoder(
  config: TransformerConfig, model_type: str, architecture: str
) -> dict[str, Any]:
  """Returns the `config.json` of a text model, without those of experts.

  Raises:
    ValueError: see `config_to_hf`.
  """
  hf = hf_config.write_decoder(config, model_type, architecture)
  del hf["rope_scaling"], hf["rope_theta"]  # transformers reads the share in one place
  hf["rope_parameters"]["partial_rotary_factor"] = config.rope.partial
  if config.rope.rotated(config.head_dim) == 2 * sum(_SECTIONS):
    hf["rope_parameters"] |= {
      "mrope_section": list(_SECTIONS),
      "mrope_interleaved": True,
    }
  names = {kind: name for name, kind in _LAYER_TYPES.items()}
  types = config.layer_types or ("full",) * config.num_layers
  if unknown := set(types) - set(names):
    raise ValueError(
      f"layer_types has {sorted(unknown)}; expected some of {sorted(names)}, the only "
      "layers of Qwen3.5. Save the model as another family"
    )
  hf["layer_types"] = [names[kind] for kind in types]
  mixer = dict(dict(config.type_fields).get("linear", ())).get("mixer")
  return hf | ({} if mixer is None else _write_mixer(mixer))


def _write_mixer(mixer: object) -> dict[str, Any]:
  if not isinstance(mixer, DeltaNetConfig):
    raise ValueError(
      f"the mixer of linear layers is {mixer!r}; expected a DeltaNetConfig, as in all "
      "Qwen3.5 models. Save the model as another family"
    )
  return {
    "linear_num_value_heads": mixer.num_heads,
    "linear_num_key_heads": mixer.num_key_heads,
    "linear_value_head_dim": mixer.head_dim,
    "linear_key_head_dim": mixer.key_dim,
    "linear_conv_kernel_dim": mixer.conv_taps,
  }


def canonical_key(key: str) -> str:
  """Returns a tensor's name without the prefix of a model with a vision tower."""
  return key.replace("model.language_model.", "model.", 1)


FAMILY = Family(
  name="qwen3_5",
  model_types=("qwen3_5_text", "qwen3_5"),
  config_class=ModelConfig,
  model_class=Qwen3p5,
  names=NAMES,
  config_from_hf=config_from_hf,
  config_to_hf=config_to_hf,
  canonical_key=canonical_key,
  harmless=IGNORED,
  mtp=MTP,
  presets=presets_of(ModelConfig),
  hub_names={"qwen3.6-27b": "qwen3p5_27b"},
)
