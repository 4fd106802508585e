"""Qwen 3 in Hugging Face's words."""

from __future__ import annotations

from typing import Any

from tunix.models.qwen2 import params as qwen2_params
from tunix.models.qwen3.model import ModelConfig
from tunix.models.transformer import hf_config, params
from tunix.models.transformer.config import MoEConfig, TransformerConfig

NAMES: params.NameTable = params.DECODER


def config_from_hf(hf: hf_config.HfConfig) -> ModelConfig:
  """`ModelConfig` of a `config.json` with model_type "qwen3" or "qwen3_moe".

  Raises:
    ValueError: see `hf_config.decoder_fields`; or some of the layers of a mixture are
      dense.
  """
  moe = hf.get("model_type") == "qwen3_moe"
  if moe:
    hf = {"num_key_value_heads": 4} | dict(hf)  # what an absent field means
  sliding = qwen2_params.qwen_sliding(hf)
  if moe and sliding is not None:  # all layers, whatever the file says of them
    hf, sliding = dict(hf) | {"layer_types": None}, lambda i: True
  # The two kinds differ in what an absent head_dim means.
  fields = hf_config.decoder_fields(hf, head_dim=None if moe else 128, sliding=sliding)
  if moe:
    fields["moe"] = _read_moe(hf)
  return ModelConfig(**fields)


def _read_moe(hf: hf_config.HfConfig) -> MoEConfig:
  mixed = {"decoder_sparse_step": (1, None), "mlp_only_layers": ([], None)}
  for field, accepted in mixed.items():
    if hf.get(field) not in accepted:
      raise ValueError(
        f"{field} is {hf[field]!r}: supported are mixtures in which every layer has "
        "experts"
      )
  # transformers 5 writes the newer of the two names, hub folders have the older one.
  newer = hf.get("num_local_experts") is not None
  return MoEConfig(
    num_experts=hf_config.integer(hf, "num_local_experts" if newer else "num_experts"),
    experts_per_token=hf_config.integer(hf, "num_experts_per_tok"),
    hidden_dim=hf_config.integer(hf, "moe_intermediate_size"),
    normalise=bool(hf.get("norm_topk_prob", False)),
  )


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """The `config.json` of a Qwen 3 model, dense or a mixture."""
  layers = qwen2_params.qwen_layers_to_hf(config)
  if config.moe is None:
    return hf_config.write_decoder(config, "qwen3", "Qwen3ForCausalLM") | layers
  hf = hf_config.write_decoder(config, "qwen3_moe", "Qwen3MoeForCausalLM")
  return (
    hf
    | layers
    | {
      "num_experts": config.moe.num_experts,
      "num_experts_per_tok": config.moe.experts_per_token,
      "moe_intermediate_size": config.moe.hidden_dim,
      "norm_topk_prob": config.moe.normalise,
      "decoder_sparse_step": 1,
      "mlp_only_layers": [],
    }
  )
