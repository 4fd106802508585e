"""DeepSeek-V3 checkpoints: `config.json` and the family.

The tensor names are in the table `transformer.hf.mla.NAMES`.
"""

from __future__ import annotations

from typing import Any

from tunix.models.deepseek_v3.model import DeepseekV3, ModelConfig
from tunix.models.family import Family, presets_of
from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.hf import (
  config as hf_config,
  mla as hf_mla,
  values as hf_values,
)
from tunix.utils import checks

# transformers' values of absent fields.
_DEFAULTS = {
  "n_shared_experts": 1,
  "n_routed_experts": 256,
  "routed_scaling_factor": 2.5,
  "moe_intermediate_size": 2048,
  "kv_lora_rank": 512,
  "q_lora_rank": 1536,
  "qk_rope_head_dim": 64,
  "qk_nope_head_dim": 128,
  "v_head_dim": 128,
  "n_group": 8,
  "topk_group": 4,
  "num_experts_per_tok": 8,
  "first_k_dense_replace": 3,
  "norm_topk_prob": True,
  "max_position_embeddings": 4096,
}


def config_from_hf(hf: hf_config.HfConfig) -> ModelConfig:
  """Returns the `ModelConfig` of a `config.json` with model_type "deepseek_v3".

  Raises:
    ValueError: see `hf_mla.read`.
  """
  hf = _DEFAULTS | dict(hf)
  layers = hf_values.layers(hf)
  dense = min(
    hf_values.integer(hf, "first_k_dense_replace", checks.NOT_NEGATIVE), layers
  )
  return ModelConfig(**hf_mla.read(hf, range(dense)))


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """Returns the `config.json` of a DeepSeek-V3 model, without MTP layers.

  Raises:
    ValueError: see `hf_mla.write`; or layers without experts follow one with experts.
  """
  hf = hf_mla.write(config, "deepseek_v3", "DeepseekV3ForCausalLM")
  assert config.moe is not None
  dense = config.moe.dense_layers
  if dense != tuple(range(len(dense))):
    raise ValueError(
      f"dense_layers is {dense}; expected the first layers, as in all DeepSeek-V3 "
      "models. Save the model as another family"
    )
  return hf | {"first_k_dense_replace": len(dense), "num_nextn_predict_layers": 0}


FAMILY = Family(
  name="deepseek_v3",
  model_types=("deepseek_v3",),
  config_class=ModelConfig,
  model_class=DeepseekV3,
  names=hf_mla.NAMES,
  config_from_hf=config_from_hf,
  config_to_hf=config_to_hf,
  mtp=hf_mla.MTP,
  presets=presets_of(ModelConfig),
  hub_names=dict.fromkeys(
    ("deepseek-v3", "deepseek-v3-base", "deepseek-v3-0324", "deepseek-r1"),
    "deepseek_v3_671b",
  ),
)
