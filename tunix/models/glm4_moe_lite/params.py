"""GLM-4 MoE lite checkpoints: `config.json` and the family.

The tensor names are in the table `transformer.hf.mla.NAMES`.
"""

from __future__ import annotations

from typing import Any

from tunix.models.family import Family, presets_of
from tunix.models.glm4_moe_lite.model import Glm4MoeLite, ModelConfig
from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.hf import (
  config as hf_config,
  mla as hf_mla,
  values as hf_values,
)

# transformers' values of absent fields.
_DEFAULTS = {
  "rms_norm_eps": 1e-5,
  "n_shared_experts": 1,
  "n_routed_experts": 64,
  "routed_scaling_factor": 1.8,
  "moe_intermediate_size": 1536,
  "kv_lora_rank": 512,
  "q_lora_rank": 768,
  "qk_rope_head_dim": 64,
  "qk_nope_head_dim": 192,
  "v_head_dim": 256,
  "n_group": 1,
  "topk_group": 1,
  "num_experts_per_tok": 4,
  "norm_topk_prob": True,
}


def config_from_hf(hf: hf_config.HfConfig) -> ModelConfig:
  """Returns the `ModelConfig` of a `config.json` with model_type "glm4_moe_lite".

  Raises:
    ValueError: see `hf_mla.read`; or `mlp_layer_types` does not name every layer.
  """
  hf = _DEFAULTS | dict(hf)
  layers = hf_values.layers(hf)
  types = hf_values.listed(hf, "mlp_layer_types") or ["dense"] + ["sparse"] * (
    layers - 1
  )
  is_list = isinstance(types, list) and set(map(str, types)) <= {"dense", "sparse"}
  if not is_list or len(types) != layers:
    raise ValueError(
      f"mlp_layer_types is {types!r}; expected a list of 'dense' and 'sparse' for "
      f"{layers} layers. Correct config.json"
    )
  dense = [i for i, name in enumerate(types) if name == "dense"]
  return ModelConfig(**hf_mla.read(hf, dense))


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """Returns the `config.json` of a GLM-4 MoE lite model.

  Raises:
    ValueError: see `hf_mla.write`.
  """
  hf = hf_mla.write(config, "glm4_moe_lite", "Glm4MoeLiteForCausalLM")
  assert config.moe is not None
  dense = config.moe.dense_layers
  types = ["dense" if i in dense else "sparse" for i in range(config.num_layers)]
  return hf | {"mlp_layer_types": types}


FAMILY = Family(
  name="glm4_moe_lite",
  model_types=("glm4_moe_lite",),
  config_class=ModelConfig,
  model_class=Glm4MoeLite,
  names=hf_mla.NAMES,
  config_from_hf=config_from_hf,
  config_to_hf=config_to_hf,
  mtp=hf_mla.MTP,
  presets=presets_of(ModelConfig),
  hub_names={"glm-4.7-flash": "glm4p7_flash"},
)
