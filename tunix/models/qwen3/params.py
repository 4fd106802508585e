"""Qwen 3 checkpoints: `config.json` and the family.

The tensor names are in the table `transformer.params.DECODER`.
"""

from __future__ import annotations

import functools
from typing import Any

from tunix.models.family import Family, Preset, presets_of
from tunix.models.qwen2 import params as qwen2_params
from tunix.models.qwen3.model import ModelConfig, Qwen3
from tunix.models.transformer.config import MoEConfig, TransformerConfig
from tunix.models.transformer.hf import (
  config as hf_config,
  moe as hf_moe,
  values as hf_values,
)


def config_from_hf(hf: hf_config.HfConfig) -> ModelConfig:
  """Returns the `ModelConfig` of model_type "qwen3" or "qwen3_moe".

  Raises:
    ValueError: see `hf_config.decoder_fields`; or every layer of a mixture is dense.
  """
  moe = hf.get("model_type") == "qwen3_moe"
  if moe:
    hf = {"num_key_value_heads": 4} | dict(
      hf
    )  # transformers' value of the absent field
  sliding = qwen2_params.qwen_sliding(hf)
  if moe and sliding is not None:  # all layers slide; layer_types is ignored
    hf, sliding = dict(hf) | {"layer_types": None}, lambda i: True
  # An absent head_dim is 128 in dense models and hidden_size / heads in mixtures.
  fields = hf_config.decoder_fields(hf, head_dim=None if moe else 128, sliding=sliding)
  if moe:
    fields["moe"] = _read_moe(hf)
  return ModelConfig(**fields)


def _read_moe(hf: hf_config.HfConfig) -> MoEConfig:
  layers = range(hf_values.layers(hf))
  only_mlp = set(map(str, hf_values.listed(hf, "mlp_only_layers")))
  field = "decoder_sparse_step"
  step = hf_values.integer({field: hf.get(field) or 1}, field)
  dense = tuple(i for i in layers if str(i) in only_mlp or (i + 1) % step)
  if len(dense) == len(layers):
    raise ValueError(
      f"mlp_only_layers {hf.get('mlp_only_layers') or []} and "
      f"decoder_sparse_step {step} leave none of "
      f"{len(layers)} layers with experts; expected one at least, or model_type qwen3"
    )
  # transformers 5 writes num_local_experts; folders on the hub have num_experts.
  newer = hf.get("num_local_experts") is not None
  experts = "num_local_experts" if newer else "num_experts"
  return MoEConfig(
    num_experts=hf_values.integer(hf, experts, hf_values.EXPERTS),
    experts_per_token=hf_values.integer(hf, "num_experts_per_tok"),
    hidden_dim=hf_values.integer(hf, "moe_intermediate_size"),
    normalise=hf_values.flag(hf, "norm_topk_prob"),
    **hf_moe.read_losses(hf),
    dense_layers=dense,
  )


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """Returns the `config.json` of a Qwen 3 model, dense or a mixture."""
  layers = qwen2_params.qwen_layers_to_hf(config)
  if config.moe is None:
    return hf_config.write_decoder(config, "qwen3", "Qwen3ForCausalLM") | layers
  hf = hf_config.write_decoder(config, "qwen3_moe", "Qwen3MoeForCausalLM")
  return (
    hf
    | layers
    | hf_moe.write_losses(config.moe)
    | {
      "num_experts": config.moe.num_experts,
      "num_experts_per_tok": config.moe.experts_per_token,
      "moe_intermediate_size": config.moe.hidden_dim,
      "norm_topk_prob": config.moe.normalise,
      "decoder_sparse_step": 1,
      "mlp_only_layers": [*config.moe.dense_layers],
    }
  )


def _presets() -> dict[str, Preset]:
  presets = presets_of(ModelConfig)
  # The base checkpoints have the same weights' shapes and a shorter context.
  for size in ("0p6b", "1p7b", "4b", "8b", "14b"):
    make = presets[f"qwen3_{size}"]
    presets[f"qwen3_{size}_base"] = functools.partial(make, max_position=32_768)
  return presets


FAMILY = Family(
  name="qwen3",
  model_types=("qwen3", "qwen3_moe"),
  config_class=ModelConfig,
  model_class=Qwen3,
  config_from_hf=config_from_hf,
  config_to_hf=config_to_hf,
  presets=_presets(),
)
