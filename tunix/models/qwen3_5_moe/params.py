"""Qwen3.5 mixtures: `config.json`, tensor names and the family.

As for the dense models, the folders on the hub hold a tower of images and MTP layers
beside the text model (model_type "qwen3_5_moe"). The text model is read, and saved as a
folder of its own (model_type "qwen3_5_moe_text").

Folders on the hub, and folders that we save, hold the experts of a layer in two
tensors. transformers writes a tensor for each map of each expert, see
`models.fused_experts`.
"""

from __future__ import annotations

from typing import Any

from tunix.models.family import Family, presets_of
from tunix.models.qwen3_5 import params as qwen3_5
from tunix.models.qwen3_5_moe.model import ModelConfig, Qwen3p5Moe, experts
from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.hf import config as hf_config, moe as hf_moe
from tunix.models.transformer.hf.values import EXPERTS, integer
from tunix.models.transformer.params import HfName, NameTable

# transformers' values of absent fields.
_DEFAULTS = {
  "vocab_size": 248_320,
  "hidden_size": 2048,
  "num_hidden_layers": 40,
  "num_attention_heads": 16,
  "num_key_value_heads": 2,
  "max_position_embeddings": 32_768,
  "linear_conv_kernel_dim": 4,
  "linear_key_head_dim": 128,
  "linear_value_head_dim": 128,
  "linear_num_key_heads": 16,
  "linear_num_value_heads": 32,
  "num_experts": 256,
  "num_experts_per_tok": 8,
  "moe_intermediate_size": 512,
  "shared_expert_intermediate_size": 512,
}

_MLP = "model.layers.{i}.mlp."
NAMES: NameTable = {
  # Without the separate experts: their order here is that of PEFT's adapters.
  **{path: name for path, name in qwen3_5.NAMES.items() if ".experts." not in path},
  "layers.mlp.experts.gate_up_proj.kernel": HfName(f"{_MLP}experts.gate_up_proj", True),
  "layers.mlp.experts.down_proj.kernel": HfName(f"{_MLP}experts.down_proj", True),
  "layers.mlp.shared_gate.kernel": HfName(f"{_MLP}shared_expert_gate.weight", True),
  **{
    f"layers.mlp.shared.{name}.kernel": HfName(
      f"{_MLP}shared_expert.{name}.weight", True
    )
    for name in ("gate_proj", "up_proj", "down_proj")
  },
}


def config_from_hf(hf: hf_config.HfConfig) -> ModelConfig:
  """Returns the `ModelConfig` of "qwen3_5_moe_text", or of the text of "qwen3_5_moe".

  Raises:
    ValueError: see `hf_config.decoder_fields`; or a type of layer is unknown.
  """
  hf = _DEFAULTS | qwen3_5.text_config(hf)
  width = integer(hf, "moe_intermediate_size")
  moe = experts(
    integer(hf, "num_experts", EXPERTS),
    integer(hf, "num_experts_per_tok"),
    width,
    integer(hf, "shared_expert_intermediate_size"),
    **hf_moe.read_losses(hf),
  )
  fields = qwen3_5.decoder_fields(hf | {"intermediate_size": width})
  return ModelConfig(**fields, moe=moe)


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """Returns the `config.json` of a Qwen3.5 mixture's text model.

  Raises:
    ValueError: a layer has no experts, or its experts are not those of Qwen3.5; or see
      `qwen3_5.params.config_to_hf`.
  """
  moe = config.moe
  if moe is None or not moe.shared_gate or not moe.fused_halves or moe.dense_layers:
    raise ValueError(
      f"moe is {moe!r}; expected fused experts in every layer and a shared expert "
      "with a gate, as in all Qwen3.5 mixtures. Save the model as another family"
    )
  hf = qwen3_5.write_decoder(config, "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM")
  del hf["intermediate_size"]
  return (
    hf
    | hf_moe.write_losses(moe)
    | {
      "num_experts": moe.num_experts,
      "num_experts_per_tok": moe.experts_per_token,
      "moe_intermediate_size": moe.hidden_dim,
      "shared_expert_intermediate_size": moe.shared_hidden_dim,
    }
  )


FAMILY = Family(
  name="qwen3_5_moe",
  model_types=("qwen3_5_moe_text", "qwen3_5_moe"),
  config_class=ModelConfig,
  model_class=Qwen3p5Moe,
  names=NAMES,
  config_from_hf=config_from_hf,
  config_to_hf=config_to_hf,
  canonical_key=qwen3_5.canonical_key,
  harmless=qwen3_5.IGNORED,
  mtp=qwen3_5.MTP,
  presets=presets_of(ModelConfig),
  hub_names={"qwen3.6-35b-a3b": "qwen3p5_35b_a3b"},
)
