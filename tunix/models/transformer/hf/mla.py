"""Reader and writer of latent attention and its mixtures in `config.json`.

DeepSeek-V3 and GLM-4 MoE lite have these fields.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from tunix.models.transformer.config import MLAConfig, MoEConfig, TransformerConfig
from tunix.models.transformer.hf import (
  config as hf_config,
  moe as hf_moe,
  values as hf_values,
)
from tunix.models.transformer.params import DECODER, HfName, MTPNames, NameTable
from tunix.utils import checks

# Field -> the values that the decoder supports.
_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
  "scoring_func": ("sigmoid", None),
  "topk_method": ("noaux_tc", None),
  "moe_layer_freq": (1, None),
}
_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")

NAMES: NameTable = {
  **DECODER,
  **{
    f"layers.attn.{x}.{ours}": HfName(
      f"model.layers.{{i}}.self_attn.{x}.{theirs}", ours == "kernel"
    )
    for x in _LATENT
    for ours, theirs in (("kernel", "weight"), ("bias", "bias"))
  },
  **{
    f"layers.attn.{x}.scale": HfName(f"model.layers.{{i}}.self_attn.{x}.weight")
    for x in ("q_a_layernorm", "kv_a_layernorm")
  },
}


# The layer behind the last one.
_FURTHER = "model.layers.{n}."
MTP = MTPNames(
  count="num_nextn_predict_layers",
  prefix=_FURTHER,
  layer=_FURTHER,
  embed_norm=f"{_FURTHER}enorm",
  hidden_norm=f"{_FURTHER}hnorm",
  join=f"{_FURTHER}eh_proj",
  norm=f"{_FURTHER}shared_head.norm",
)


def read(hf: hf_config.HfConfig, dense_layers: Collection[int]) -> dict[str, Any]:
  """Returns the arguments of a `TransformerConfig`.

  Args:
    hf: the parsed `config.json`, with transformers' values of absent fields.
    dense_layers: numbers of the layers without experts.

  Raises:
    ValueError: see `hf_config.decoder_fields`.
  """
  hf_config.check_supported(hf, _SUPPORTED)

  def integer(name):
    return hf_values.integer(hf, name)

  shared = hf_values.integer(hf, "n_shared_experts", checks.NOT_NEGATIVE)
  mla = MLAConfig(
    kv_rank=integer("kv_lora_rank"),
    q_rank=None if hf.get("q_lora_rank") is None else integer("q_lora_rank"),
    nope_dim=integer("qk_nope_head_dim"),
    rope_dim=integer("qk_rope_head_dim"),
    value_dim=integer("v_head_dim"),
    interleaved=hf_values.flag(hf, "rope_interleave", True),
  )
  heads = integer("num_attention_heads")
  sizes = {"head_dim": mla.head_dim, "num_key_value_heads": heads}
  fields = hf_config.decoder_fields(dict(hf) | sizes)
  moe = MoEConfig(
    num_experts=hf_values.integer(hf, "n_routed_experts", hf_values.EXPERTS),
    experts_per_token=integer("num_experts_per_tok"),
    hidden_dim=integer("moe_intermediate_size"),
    normalise=hf_values.flag(hf, "norm_topk_prob"),
    routing="sigmoid",
    groups=integer("n_group"),
    groups_used=integer("topk_group"),
    scale=hf_values.number(hf, "routed_scaling_factor"),
    shared_hidden_dim=integer("moe_intermediate_size") * shared or None,
    dense_layers=tuple(sorted(dense_layers)),
    **hf_moe.read_losses(hf),
  )
  rope = fields["rope"]
  if rope.scaling == "yarn" and rope.mscale_all_dim and rope.factor > 1:
    grown = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0
    fields["query_scale"] = mla.query_dim**-0.5 * grown**2
  return fields | {"mla": mla, "moe": moe}


def write(
  config: TransformerConfig, model_type: str, architecture: str
) -> dict[str, Any]:
  """Returns the `config.json` of a model, without the numbers of the dense layers.

  Raises:
    ValueError: the model has no latent attention, or no experts.
  """
  mla, moe = config.mla, config.moe
  if mla is None or moe is None:
    raise ValueError(
      f"mla is {mla!r} and moe is {moe!r}; expected both in a model of {model_type}. "
      "Save the model as another family"
    )
  hf = hf_config.write_decoder(config, model_type, architecture)
  return (
    hf
    | hf_moe.write_losses(moe)
    | {
      "head_dim": mla.rope_dim,
      "kv_lora_rank": mla.kv_rank,
      "q_lora_rank": mla.q_rank,
      "qk_nope_head_dim": mla.nope_dim,
      "qk_rope_head_dim": mla.rope_dim,
      "v_head_dim": mla.value_dim,
      "rope_interleave": mla.interleaved,
      "n_routed_experts": moe.num_experts,
      "num_experts_per_tok": moe.experts_per_token,
      "moe_intermediate_size": moe.hidden_dim,
      "norm_topk_prob": moe.normalise,
      "n_group": moe.groups,
      "topk_group": moe.groups_used,
      "routed_scaling_factor": moe.scale,
      "n_shared_experts": (moe.shared_hidden_dim or 0) // moe.hidden_dim,
    }
  )
