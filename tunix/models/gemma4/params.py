"""Gemma 4 checkpoints: `config.json`, tensor names and the family.

The folders on the hub hold towers for images and sounds beside the text model
(model_type "gemma4"). Their text model is read, and saved as a folder of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunix.models.family import Family, presets_of
from tunix.models.gemma4.model import Gemma4, ModelConfig, experts
from tunix.models.transformer.config import TransformerConfig, fields_by_type
from tunix.models.transformer.hf import (
  config as hf_config,
  rope as hf_rope,
  values as hf_values,
)
from tunix.models.transformer.params import DECODER, HARMLESS, HfName, NameTable
from tunix.utils import checks

# transformers' values of absent fields.
_DEFAULTS = {
  "vocab_size": 262_144,
  "hidden_size": 2304,
  "intermediate_size": 9216,
  "num_hidden_layers": 30,
  "num_attention_heads": 8,
  "num_key_value_heads": 4,
  "head_dim": 256,
  "max_position_embeddings": 131_072,
  "sliding_window": 512,
  "hidden_activation": "gelu_pytorch_tanh",
  "hidden_size_per_layer_input": 256,
  "vocab_size_per_layer_input": 262_144,
}
_ROPE = {
  "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
  "full_attention": {
    "rope_type": "proportional",
    "partial_rotary_factor": 0.25,
    "rope_theta": 1_000_000.0,
  },
}
_GLOBAL_HEAD_DIM = 512
# "vision" lets the tokens of an image attend in both directions; there are none here.
_SUPPORTED = {"use_bidirectional_attention": (None, "vision")}

_LAYER = "model.layers.{i}."
_GATE = "layers.input_gate."
_MOE = "layers.beside.moe."
NAMES: NameTable = {
  **DECODER,
  "layer_inputs.table.embedding": HfName("model.embed_tokens_per_layer.weight"),
  "layer_inputs.projection.kernel": HfName(
    "model.per_layer_model_projection.weight", True
  ),
  "layer_inputs.norm.scale": HfName("model.per_layer_projection_norm.weight"),
  f"{_GATE}gate.kernel": HfName(f"{_LAYER}per_layer_input_gate.weight", True),
  f"{_GATE}projection.kernel": HfName(f"{_LAYER}per_layer_projection.weight", True),
  f"{_GATE}norm.scale": HfName(f"{_LAYER}post_per_layer_input_norm.weight"),
  "layers.beside.mlp_norm.scale": HfName(
    f"{_LAYER}post_feedforward_layernorm_1.weight"
  ),
  "layers.beside.out_norm.scale": HfName(
    f"{_LAYER}post_feedforward_layernorm_2.weight"
  ),
  f"{_MOE}in_norm.scale": HfName(f"{_LAYER}pre_feedforward_layernorm_2.weight"),
  f"{_MOE}router.kernel": HfName(f"{_LAYER}router.proj.weight", True),
  f"{_MOE}router_scale": HfName(f"{_LAYER}router.scale"),
  f"{_MOE}expert_scale": HfName(f"{_LAYER}router.per_expert_scale"),
  f"{_MOE}experts.gate_up_proj.kernel": HfName(f"{_LAYER}experts.gate_up_proj", True),
  f"{_MOE}experts.down_proj.kernel": HfName(f"{_LAYER}experts.down_proj", True),
  "layers.scalar": HfName(f"{_LAYER}layer_scalar"),
}


def config_from_hf(hf: hf_config.HfConfig) -> ModelConfig:
  """Returns the `ModelConfig` of model_type "gemma4_text", or of the text of "gemma4".

  Raises:
    ValueError: see `hf_config.decoder_fields`.
  """
  hf = _DEFAULTS | _text_config(hf)
  hf_config.check_supported(hf, _SUPPORTED)
  full, local = hf_rope.read_by_kind(
    {"rope_parameters": hf_values.table(hf, "rope_parameters") or _ROPE},
    1_000_000.0,
    10_000.0,
  )
  read_here = ("rope_parameters", "rope_scaling", *_SUPPORTED)
  plain = {name: value for name, value in hf.items() if name not in read_here}
  plain |= {
    "hidden_act": hf_values.text(hf, "hidden_activation", "silu"),
    "layer_types": _types(hf),
  }
  fields = hf_config.decoder_fields(plain, tied=True, sliding=lambda i: False)
  cap = "final_logit_softcapping"
  full_only = {"layer_types": ("full",) * fields["num_layers"]}
  return ModelConfig(
    **full_only
    | fields
    | {
      "rope": full,
      "local_rope": local,
      "final_softcap": None if hf.get(cap) is None else hf_values.number(hf, cap),
      "type_fields": fields_by_type(full=_full_layers(hf)),
    }
    | _shared(hf, fields["hidden_dim"])
    | _layer_inputs(hf)
    | _experts(hf)
  )


def _text_config(hf: hf_config.HfConfig) -> dict[str, Any]:
  """Returns the settings of the text model."""
  text = hf.get("text_config")
  if hf.get("model_type") != "gemma4":
    return dict(hf)
  if not isinstance(text, Mapping):
    raise ValueError(
      f"text_config is {text!r}; expected the settings of the text model"
    )
  outer = ("quantization_config", "tie_word_embeddings")
  return {field: hf[field] for field in outer if field in hf} | dict(text)


def _types(hf: hf_config.HfConfig) -> list[str]:
  """Returns the kind of each layer; the last one is full, as in transformers."""
  count = hf_values.layers(hf)
  pattern = ("sliding_attention",) * 5 + ("full_attention",)
  types = hf_values.listed(hf, "layer_types") or [pattern[i % 6] for i in range(count)]
  return [*types[:-1], "full_attention"]


def _full_layers(hf: hf_config.HfConfig) -> dict[str, Any]:
  """Returns the fields of the full layers, in either spelling.

  `global_head_dim` and `num_global_key_value_heads` are the spelling of the published
  files. transformers writes `per_layer_config`, with the values of each full layer.

  Raises:
    ValueError: the full layers differ, or other layers have values of their own.
  """
  joint = hf_values.flag(hf, "attention_k_eq_v")
  heads = "num_global_key_value_heads"
  by_layer = hf.get("per_layer_config")
  if by_layer is None:
    own = {"head_dim": hf.get("global_head_dim") or _GLOBAL_HEAD_DIM}
    if joint and hf.get(heads) is not None:
      own["num_key_value_heads"] = hf[heads]
  else:
    full = [i for i, name in enumerate(_types(hf)) if name == "full_attention"]
    values = list(by_layer.values()) if isinstance(by_layer, Mapping) else []
    own = values[0] if values else None
    if (
      not isinstance(own, Mapping)
      or sorted(map(_layer_number, by_layer)) != full
      or values != [own] * len(values)
    ):
      raise ValueError(
        f"per_layer_config is {by_layer!r}; expected the same settings for each full "
        f"layer, {full}, and for no other"
      )
  fields: dict[str, Any] = {}
  for name, field in _FULL_FIELDS.items():
    if name in own:
      fields[field] = hf_values.integer(own, name)
  return fields | ({"values_from_keys": True} if joint else {})


def _layer_number(key: object) -> int:
  """Returns the layer of a key; transformers writes "05" beside "11"."""
  return int(str(key)) if str(key).isdecimal() else -1


_FULL_FIELDS = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}


def _shared(hf: hf_config.HfConfig, hidden_dim: int) -> dict[str, Any]:
  """Returns the fields of layers that read the keys of another layer."""
  field = "num_kv_shared_layers"
  count = hf_values.integer({field: 0} | dict(hf), field, checks.NOT_NEGATIVE)
  if not count:
    return {}
  wide = {"shared_kv_hidden_dim": 2 * hidden_dim}
  doubled = hf_values.flag(hf, "use_double_wide_mlp")
  return {"shared_kv_layers": count} | (wide if doubled else {})


def _layer_inputs(hf: hf_config.HfConfig) -> dict[str, Any]:
  field = "hidden_size_per_layer_input"  # null means 0
  given = 0 if hf[field] is None else hf[field]
  width = hf_values.integer({field: given}, field, checks.NOT_NEGATIVE)
  if not width:
    return {}
  return {
    "layer_input_dim": width,
    "layer_input_vocab": hf_values.integer(hf, "vocab_size_per_layer_input"),
  }


def _experts(hf: hf_config.HfConfig) -> dict[str, Any]:
  if not hf_values.flag(hf, "enable_moe_block"):
    return {}
  counts = ("num_experts", "moe_intermediate_size", "top_k_experts")
  return {"moe": experts(*(hf_values.integer(hf, name) for name in counts))}


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """Returns the `config.json` of a Gemma 4 text model."""
  hf = hf_config.write_decoder(config, "gemma4_text", "Gemma4ForCausalLM")
  del hf["rope_scaling"], hf["rope_theta"]
  own: dict[str, Any] = {name: dict(fields) for name, fields in config.type_fields}
  full = own.get("full", {})
  joint = full.get("values_from_keys", config.values_from_keys)
  heads = full.get("num_kv_heads", config.num_kv_heads)
  moe = config.moe
  if moe is not None:
    hf |= {
      "num_experts": moe.num_experts,
      "moe_intermediate_size": moe.hidden_dim,
      "top_k_experts": moe.experts_per_token,
    }
  return (
    hf
    | hf_config.write_layers(config)
    | hf_rope.write_by_kind(config)
    | {
      "hidden_activation": hf["hidden_act"],
      "final_logit_softcapping": config.final_softcap,
      "global_head_dim": full.get("head_dim", config.head_dim),
      "num_global_key_value_heads": heads if joint else None,
      "attention_k_eq_v": joint,
      "enable_moe_block": moe is not None,
      "num_kv_shared_layers": config.shared_kv_layers,
      "use_double_wide_mlp": config.shared_kv_hidden_dim is not None,
      "hidden_size_per_layer_input": config.layer_input_dim or 0,
      "vocab_size_per_layer_input": config.layer_input_vocab or config.vocab_size,
    }
  )


def canonical_key(key: str) -> str:
  """Returns a tensor's name without the prefix of a model with towers."""
  text = "model.language_model."
  return f"model.{key.removeprefix(text)}" if key.startswith(text) else key


FAMILY = Family(
  name="gemma4",
  model_types=("gemma4_text", "gemma4"),
  config_class=ModelConfig,
  model_class=Gemma4,
  names=NAMES,
  config_from_hf=config_from_hf,
  config_to_hf=config_to_hf,
  canonical_key=canonical_key,
  harmless=(
    *HARMLESS,
    # The published files hold them for layers that read the keys of others, too.
    r"model\.layers\.\d+\.self_attn\.[kv]_(proj|norm)\.weight",
    r"model\.(vision_tower|audio_tower|embed_vision|embed_audio)\..*",
  ),
  presets=presets_of(ModelConfig),
  hub_names={
    f"gemma-4-{size}{ending}": f"gemma4_{size.replace('-', '_')}"
    for size in ("e2b", "e4b", "31b", "26b-a4b")
    for ending in ("", "-it")
  },
)
