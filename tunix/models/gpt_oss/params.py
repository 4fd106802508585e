"""gpt-oss checkpoints: `config.json`, tensor names and the family.

Folders hold the experts in bfloat16, or in MXFP4 as published (see `models.mxfp4`).
"""

from __future__ import annotations

from typing import Any

from tunix.models.family import Family, presets_of
from tunix.models.gpt_oss import model as gpt_oss
from tunix.models.gpt_oss.model import GptOss, ModelConfig
from tunix.models.transformer.config import ClampedGate, TransformerConfig
from tunix.models.transformer.hf import (
  config as hf_config,
  moe as hf_moe,
  values as hf_values,
)
from tunix.models.transformer.params import DECODER, HfName, NameTable

# transformers' values of absent fields.
_DEFAULTS = {
  "num_hidden_layers": 36,
  "num_local_experts": 128,
  "num_experts_per_tok": 4,
  "vocab_size": 201_088,
  "hidden_size": 2880,
  "intermediate_size": 2880,
  "num_attention_heads": 64,
  "num_key_value_heads": 8,
  "sliding_window": 128,
  "max_position_embeddings": 131_072,
  "rms_norm_eps": 1e-5,
  "attention_bias": True,
  "rope_theta": 150_000.0,
}
_ROPE = {
  "rope_type": "yarn",
  "factor": 32.0,
  "beta_fast": 32.0,
  "beta_slow": 1.0,
  "truncate": False,
  "original_max_position_embeddings": 4096,
}
_EXPERTS = "model.layers.{i}.mlp.experts."

NAMES: NameTable = {
  # Without the separate experts: their order here is that of PEFT's adapters.
  **{path: name for path, name in DECODER.items() if ".experts." not in path},
  "layers.attn.sinks": HfName("model.layers.{i}.self_attn.sinks"),
  "layers.mlp.router.kernel": HfName("model.layers.{i}.mlp.router.weight", True),
  "layers.mlp.router.bias": HfName("model.layers.{i}.mlp.router.bias"),
  **{
    f"layers.mlp.experts.{name}.{field}": HfName(f"{_EXPERTS}{name}{ending}")
    for name in ("gate_up_proj", "down_proj")
    for field, ending in (("kernel", ""), ("bias", "_bias"))
  },
}


def config_from_hf(hf: hf_config.HfConfig) -> ModelConfig:
  """Returns the `ModelConfig` of a `config.json` with model_type "gpt_oss".

  Raises:
    ValueError: see `hf_config.decoder_fields`.
  """
  spelled = hf_values.table(hf, "rope_scaling") or hf_values.table(
    hf, "rope_parameters"
  )
  hf = _DEFAULTS | dict(hf) | ({} if spelled else {"rope_parameters": _ROPE})
  hf_config.check_supported(hf, {"hidden_act": ("silu", None)})
  fields = hf_config.decoder_fields(hf, head_dim=64, sliding=lambda i: (i + 1) % 2 == 1)
  gate = ClampedGate(
    alpha=hf_values.number(hf, "swiglu_alpha", ClampedGate.alpha),
    limit=hf_values.number(hf, "swiglu_limit", ClampedGate.limit),
  )
  moe = gpt_oss.experts(
    hf_values.integer(hf, "num_local_experts", hf_values.EXPERTS),
    hf_values.integer(hf, "intermediate_size"),
    hf_values.integer(hf, "num_experts_per_tok"),
    clamped_gate=gate,
    **hf_moe.read_losses(hf),
  )
  return ModelConfig(**fields, moe=moe)


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """Returns the `config.json` of a gpt-oss model.

  Raises:
    ValueError: the model has no experts, or its gate is not clamped.
  """
  moe = config.moe
  if moe is None or moe.clamped_gate is None:
    raise ValueError(
      f"moe is {moe!r}; expected experts with a clamped gate, as in all gpt-oss "
      "models. Save the model as another family"
    )
  hf = hf_config.write_decoder(config, "gpt_oss", "GptOssForCausalLM")
  return (
    hf
    | hf_config.write_layers(config)
    | hf_moe.write_losses(moe)
    | {
      "intermediate_size": moe.hidden_dim,
      "num_local_experts": moe.num_experts,
      "num_experts_per_tok": moe.experts_per_token,
      "swiglu_alpha": moe.clamped_gate.alpha,
      "swiglu_limit": moe.clamped_gate.limit,
    }
  )


FAMILY = Family(
  name="gpt_oss",
  model_types=("gpt_oss",),
  config_class=ModelConfig,
  model_class=GptOss,
  names=NAMES,
  config_from_hf=config_from_hf,
  config_to_hf=config_to_hf,
  presets=presets_of(ModelConfig),
  hub_names={"gpt-oss-20b": "gpt_oss_20b", "gpt-oss-120b": "gpt_oss_120b"},
)
