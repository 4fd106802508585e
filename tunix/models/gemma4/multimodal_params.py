"""Checkpoints of Gemma 4 with images: `config.json`, tensor names and the family.

Of a folder with a tower of sounds, this tower is left out.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from tunix.models.family import Family
from tunix.models.gemma4 import params as text_params
from tunix.models.gemma4.multimodal import MultimodalConfig, MultimodalGemma4
from tunix.models.gemma4.vision import LIMITS, Gemma4TowerConfig
from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.hf import config as hf_config
from tunix.models.transformer.hf.values import HfConfig, flag, integer, number, table
from tunix.models.transformer.params import HfName, NameTable
from tunix.models.vision import params as tower_params
from tunix.utils import checks
from tunix.utils.setting import named_values

_TOWER = "model.vision_tower."
_LAYER, _OURS = f"{_TOWER}encoder.layers.{{i}}.", "vision_tower.layers."
_NORMS = {
  "layer_norm1": "input_layernorm",
  "post_norm1": "post_attention_layernorm",
  "layer_norm2": "pre_feedforward_layernorm",
  "post_norm2": "post_feedforward_layernorm",
  "attn.q_norm": "self_attn.q_norm",
  "attn.k_norm": "self_attn.k_norm",
}
_LINEARS = {
  **{f"attn.{x}_proj": f"self_attn.{x}_proj" for x in ("q", "k", "v")},
  "attn.out_proj": "self_attn.o_proj",
  **{f"mlp.{x}_proj": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}


def _text_key(key: str) -> str:
  """Returns the name of a tensor of the text model in a folder with towers."""
  plain = key.removeprefix("model.")
  return key if plain == key else f"model.language_model.{plain}"


NAMES: NameTable = {
  **{
    path: HfName(_text_key(name.key), name.transpose)
    for path, name in text_params.NAMES.items()
  },
  "vision_tower.patch_projection.kernel": HfName(
    f"{_TOWER}patch_embedder.input_proj.weight", True
  ),
  "vision_tower.positions": HfName(f"{_TOWER}patch_embedder.position_embedding_table"),
  **{f"{_OURS}{k}.scale": HfName(f"{_LAYER}{v}.weight") for k, v in _NORMS.items()},
  **{
    f"{_OURS}{ours}.kernel": HfName(f"{_LAYER}{theirs}.linear.weight", True)
    for ours, theirs in _LINEARS.items()
  },
  **{
    f"{_OURS}{ours}.{limit}": HfName(f"{_LAYER}{theirs}.{limit}")
    for ours, theirs in _LINEARS.items()
    for limit in LIMITS
  },
  "multi_modal_projector.std_bias": HfName(f"{_TOWER}std_bias"),
  "multi_modal_projector.std_scale": HfName(f"{_TOWER}std_scale"),
  "multi_modal_projector.linear.kernel": HfName(
    "model.embed_vision.embedding_projection.weight", True
  ),
}

# Field -> field of vision_config.
_SIZES = {
  "num_layers": "num_hidden_layers",
  "embed_dim": "hidden_size",
  "hidden_dim": "intermediate_size",
  "num_heads": "num_attention_heads",
  "patch_size": "patch_size",
  "pooling": "pooling_kernel_size",
  "num_positions": "position_embedding_size",
}
# Values of absent fields, those of transformers.
_VISION_DEFAULTS = {
  "num_hidden_layers": 16,
  "hidden_size": 768,
  "intermediate_size": 3072,
  "num_attention_heads": 12,
  "num_key_value_heads": 12,
  "head_dim": 64,
  "patch_size": 16,
  "pooling_kernel_size": 3,
  "position_embedding_size": 10_240,
  "hidden_activation": "gelu_pytorch_tanh",
}
_SUPPORTED = {
  "model_type": ("gemma4_vision",),
  "attention_bias": (False, None),
  "attention_dropout": (0.0, None),
}


def config_from_hf(hf: HfConfig) -> MultimodalConfig:
  """Returns the `MultimodalConfig` of a `config.json` with model_type "gemma4".

  Raises:
    ValueError: see `gemma4.params.config_from_hf` and `vision.params`.
  """
  text = tower_params.section(hf, "text_config")
  fields = vars(text_params.config_from_hf(hf))
  fields |= {"num_scores": hf_config.read_scores(hf)}
  soft, pad = {"image_token_id": 258_880, **hf}, {"pad_token_id": 0, **text}
  return MultimodalConfig(
    **fields,
    vision=_tower(hf),
    attends_within_images=text.get("use_bidirectional_attention") == "vision",
    image_token_id=integer(soft, "image_token_id", checks.NOT_NEGATIVE),
    pad_token_id=integer(pad, "pad_token_id", checks.NOT_NEGATIVE),
  )


def _tower(hf: HfConfig) -> Gemma4TowerConfig:
  vision = {**_VISION_DEFAULTS, **tower_params.section(hf, "vision_config")}
  sizes: dict[str, Any] = {k: integer(vision, name) for k, name in _SIZES.items()}
  heads = sizes["num_heads"]
  derived = {
    "head_dim": (sizes["embed_dim"] // heads,),
    "num_key_value_heads": (heads,),
  }
  rope = {"rope_theta": vision.get("rope_theta"), **table(vision, "rope_parameters")}
  known = {"rope_type": ("axial", "default")}
  hf_config.check_supported(vision, _SUPPORTED | derived, "vision_config.")
  hf_config.check_supported(rope, known, "vision_config.")
  return Gemma4TowerConfig(
    **sizes,
    activation=hf_config.read_activation(vision, "hidden_activation"),
    rope_theta=number(rope, "rope_theta", 100.0),
    norm_eps=number(vision, "rms_norm_eps", 1e-6),
    clipped=flag(vision, "use_clipped_linears"),
    standardized=flag(vision, "standardize"),
  )


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """Returns the `config.json` of a Gemma 4 with images."""
  assert isinstance(config, MultimodalConfig)
  c = config.vision
  text = text_params.config_to_hf(config) | {
    "use_bidirectional_attention": "vision" if config.attends_within_images else None,
    "pad_token_id": config.pad_token_id,
  }
  vision = {
    **{field: accepted[0] for field, accepted in _SUPPORTED.items()},
    **{_SIZES[name]: value for name, value in named_values(c, _SIZES).items()},
    "head_dim": c.embed_dim // c.num_heads,
    "num_key_value_heads": c.num_heads,
    "hidden_activation": hf_config.write_activation(c.activation),
    "rope_parameters": {"rope_type": "axial", "rope_theta": c.rope_theta},
    "rms_norm_eps": c.norm_eps,
    "use_clipped_linears": c.clipped,
    "standardize": c.standardized,
    "dtype": jnp.dtype(c.param_dtype).name,
  }
  hf = tower_params.write_model(config, "gemma4", "Gemma4", text, vision)
  return hf | {"image_token_id": config.image_token_id, "audio_config": None}


FAMILY = Family(
  name="gemma4_multimodal",
  model_types=("gemma4",),
  config_class=MultimodalConfig,
  model_class=MultimodalGemma4,
  names=NAMES,
  config_from_hf=config_from_hf,
  config_to_hf=config_to_hf,
  harmless=(
    *(
      key.replace(r"model\.", r"model\.language_model\.", 1)
      for key in text_params.FAMILY.harmless
    ),
    r"model\.(audio_tower|embed_audio)\..*",
  ),
  text_only=text_params.FAMILY,
)
