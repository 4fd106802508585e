"""Nemotron-H checkpoints: `config.json`, tensor names and the family."""

from __future__ import annotations

from typing import Any

from tunix.models.family import Family, presets_of
from tunix.models.nemotron_h.model import ModelConfig, NemotronH, layer_fields
from tunix.models.transformer.config import (
  LayerType,
  Mamba2Config,
  MoEConfig,
  TransformerConfig,
)
from tunix.models.transformer.hf import config as hf_config, values as hf_values
from tunix.models.transformer.params import HfName, NameTable
from tunix.utils import checks

# Names of the layers in `layers_block_type`, those of transformers before 5.20 too.
_TYPES: dict[str, LayerType] = {
  "linear_attention": "linear",
  "full_attention": "nope",
  "mlp": "none",
  "moe": "none",
  "mamba": "linear",
  "attention": "nope",
}
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_SUPPORTED = {
  "use_bias": (False, None),
  "mamba_proj_bias": (False, None),
  "mamba_hidden_act": ("silu", None),
  "num_nextn_predict_layers": (0, None),
  "sliding_window": (None,),
  "moe_latent_size": (None,),
}
# transformers' values of absent fields.
_DEFAULTS: dict[str, Any] = {
  "num_key_value_heads": 8,
  "head_dim": 128,
  "mlp_hidden_act": "relu2",
  "layer_norm_epsilon": 1e-5,
  "max_position_embeddings": 4096,
  "mamba_num_heads": 128,
  "mamba_head_dim": 64,
  "ssm_state_size": 128,
  "n_groups": 8,
  "conv_kernel": 4,
  "use_conv_bias": True,
  "time_step_min": 0.001,
  "n_routed_experts": 8,
  "num_experts_per_tok": 2,
  "moe_intermediate_size": 7688,
  "moe_shared_expert_intermediate_size": 7688,
  "n_group": 1,
  "topk_group": 1,
}


def config_from_hf(hf: hf_config.HfConfig) -> ModelConfig:
  """Returns the `ModelConfig` of a `config.json` with model_type "nemotron_h".

  Raises:
    ValueError: see `hf_config.decoder_fields`; or a layer has an unknown type.
  """
  hf = _DEFAULTS | dict(hf)
  hf_config.check_supported(hf, _SUPPORTED)
  names = _layer_names(hf)
  types: tuple[LayerType, ...] = tuple(_TYPES[name] for name in names)
  mixer = Mamba2Config(
    num_heads=hf_values.integer(hf, "mamba_num_heads"),
    head_dim=hf_values.integer(hf, "mamba_head_dim"),
    state_dim=hf_values.integer(hf, "ssm_state_size"),
    groups=hf_values.integer(hf, "n_groups"),
    conv_taps=hf_values.integer(hf, "conv_kernel"),
    conv_bias=hf_values.flag(hf, "use_conv_bias"),
    least_step=hf_values.number(hf, "time_step_min", 0.0, checks.NOT_NEGATIVE),
  )
  # The fields of other families that `decoder_fields` reads.
  plain = hf | {
    "num_hidden_layers": len(types),
    "layer_types": None,
    "rms_norm_eps": hf_values.number(hf, "layer_norm_epsilon", 1e-6),
    "hidden_act": hf_values.text(hf, "mlp_hidden_act", "silu"),
    "attention_bias": False,
  }
  fields = hf_config.decoder_fields(plain)
  return ModelConfig(
    **fields,
    layer_types=types,
    type_fields=layer_fields(types, mixer),
    gated_mlp=False,
    moe=_read_moe(hf, names) if "moe" in names else None,
  )


def _read_moe(hf: hf_config.HfConfig, names: list[str]) -> MoEConfig:
  def number(name):
    return hf_values.integer(hf, name)

  return MoEConfig(
    num_experts=hf_values.integer(hf, "n_routed_experts", hf_values.EXPERTS),
    experts_per_token=number("num_experts_per_tok"),
    hidden_dim=number("moe_intermediate_size"),
    normalise=hf_values.flag(hf, "norm_topk_prob", True),
    routing="sigmoid",
    groups=number("n_group"),
    groups_used=number("topk_group"),
    scale=hf_values.number(hf, "routed_scaling_factor", 1.0),
    shared_hidden_dim=number("moe_shared_expert_intermediate_size"),
    dense_layers=tuple(i for i, name in enumerate(names) if name == "mlp"),
  )


def _layer_names(hf: hf_config.HfConfig) -> list[str]:
  named = hf_values.listed(hf, "layers_block_type") or None
  pattern = hf.get("hybrid_override_pattern")
  if pattern is not None and not isinstance(pattern, str):
    raise ValueError(
      f"hybrid_override_pattern is {pattern!r}; expected one letter per layer. Correct "
      "config.json"
    )
  if named is None and pattern is None:
    raise ValueError(
      "config.json has neither layers_block_type nor hybrid_override_pattern; expected "
      "the type of each layer"
    )
  names = _TYPES if named is not None else _LETTERS
  listed = list(named or pattern or ())
  if unknown := sorted({str(name) for name in listed} - set(names)):
    raise ValueError(
      f"the layers have types {unknown}; expected some of {sorted(names)}. Correct "
      "config.json"
    )
  return [str(name) if named is not None else _LETTERS[name] for name in listed]


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """Returns the `config.json` of a Nemotron-H model.

  Raises:
    ValueError: the layers are not those of a Nemotron-H model.
  """
  types = config.layer_types or ()
  known = {ours: theirs for theirs, ours in reversed(_TYPES.items())}
  mixer = dict(dict(config.type_fields).get("linear", ())).get("mixer")
  if not types or not set(types) <= set(known) or mixer is None:
    raise ValueError(
      f"layer_types is {config.layer_types} and the mixer {mixer}; expected layers of "
      f"{sorted(known)} with a Mamba-2 mixer. Save the model as another family"
    )
  moe = config.moe
  dense = range(config.num_layers) if moe is None else moe.dense_layers
  names = [
    "moe" if kind == "none" and i not in dense else known[kind]
    for i, kind in enumerate(types)
  ]
  letters = {name: letter for letter, name in _LETTERS.items()}
  hf = hf_config.write_decoder(config, "nemotron_h", "NemotronHForCausalLM")
  own = {
    "mlp_hidden_act": hf.pop("hidden_act"),
    "layer_norm_epsilon": hf.pop("rms_norm_eps"),
    "layers_block_type": names,
    "hybrid_override_pattern": "".join(letters[name] for name in names),
    "mamba_num_heads": mixer.num_heads,
    "mamba_head_dim": mixer.head_dim,
    "ssm_state_size": mixer.state_dim,
    "n_groups": mixer.groups,
    "conv_kernel": mixer.conv_taps,
    "use_conv_bias": mixer.conv_bias,
    "time_step_min": mixer.least_step,
    "mlp_bias": False,
    "use_bias": False,
  }
  return hf | own | ({} if config.moe is None else _write_moe(config.moe))


def _write_moe(moe: MoEConfig) -> dict[str, Any]:
  return {
    "n_routed_experts": moe.num_experts,
    "num_experts_per_tok": moe.experts_per_token,
    "moe_intermediate_size": moe.hidden_dim,
    "moe_shared_expert_intermediate_size": moe.shared_hidden_dim,
    "n_shared_experts": 1,
    "norm_topk_prob": moe.normalise,
    "n_group": moe.groups,
    "topk_group": moe.groups_used,
    "routed_scaling_factor": moe.scale,
  }


def _names() -> NameTable:
  layer = "model.layers.{i}."
  linears = {f"attn.{x}_proj": f"{x}_proj" for x in ("q", "k", "v", "o", "in", "out")}
  for x in ("up_proj", "down_proj"):
    linears[f"mlp.{x}"] = x
    linears[f"mlp.experts.{x}"] = f"experts.{{e}}.{x}"
    linears[f"mlp.shared.{x}"] = f"shared_experts.{x}"
  linears["mlp.router"] = "gate"
  small = {
    "attn.conv_kernel": "conv1d.weight",
    "attn.conv_bias": "conv1d.bias",
    "attn.dt_bias": "dt_bias",
    "attn.a_log": "A_log",
    "attn.skip": "D",
    "attn.norm.scale": "norm.weight",
    "mlp.correction": "gate.e_score_correction_bias",
  }
  return {
    "embed_tokens.embedding": HfName("model.embeddings.weight"),
    "layers.input_layernorm.scale": HfName(f"{layer}norm.weight"),
    **{f"layers.{k}": HfName(f"{layer}mixer.{v}") for k, v in small.items()},
    **{
      f"layers.{k}.kernel": HfName(f"{layer}mixer.{v}.weight", transpose=True)
      for k, v in linears.items()
    },
    "norm.scale": HfName("model.norm_f.weight"),
    "lm_head.kernel": HfName("lm_head.weight", transpose=True),
    "score.kernel": HfName("score.weight", transpose=True),
  }


def _canonical(key: str) -> str:
  """Returns the name of a tensor whose file was written before transformers 5."""
  return key.replace("backbone.", "model.", 1) if key.startswith("backbone.") else key


FAMILY = Family(
  name="nemotron_h",
  model_types=("nemotron_h",),
  config_class=ModelConfig,
  model_class=NemotronH,
  names=_names(),
  config_from_hf=config_from_hf,
  config_to_hf=config_to_hf,
  presets=presets_of(ModelConfig),
  canonical_key=_canonical,
  hub_names={
    "nvidia-nemotron-nano-9b-v2": "nemotron_nano_9b_v2",
    "nvidia-nemotron-3-nano-30b-a3b-bf16": "nemotron3_nano_30b_a3b",
  },
)
