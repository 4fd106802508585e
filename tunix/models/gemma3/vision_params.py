"""The vision part of a Gemma 3 checkpoint: tensor names and `config.json`.

Checkpoints spell their tensors in four ways. transformers 5.23 reads all of them and
writes each back in its spelling. For the tensor "post_layernorm.weight" they are

  vision_tower.vision_model.     the published checkpoints (this package writes it)
  vision_tower.                  transformers 5, a model made from a config
  model.vision_tower.            the names of its modules in memory
  model.vision_tower.vision_model.

The text model's tensors begin with `language_model.model.` in the first two and with
`model.language_model.` in the others. `canonical_key` turns every spelling into the
first, so that one name table is enough.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from tunix.models.gemma3.image_tokens import ImageTokens
from tunix.models.gemma3.vision import CHANNELS, VisionConfig
from tunix.models.transformer.hf.config import check_supported
from tunix.models.transformer.hf.values import HfConfig, integer, number
from tunix.models.transformer.params import HfName, NameTable
from tunix.utils import checks

_TOWER = "vision_tower.vision_model."
_PROJECTOR = "multi_modal_projector."
_TEXT = "language_model."


def _pair(module: str, hf_module: str, weight: str, *, transpose: bool) -> NameTable:
  """Returns the entries of a weight and its bias."""
  key = _TOWER + hf_module
  return {
    f"vision_tower.{module}.{weight}": HfName(f"{key}.weight", transpose),
    f"vision_tower.{module}.bias": HfName(f"{key}.bias"),
  }


def _linear(module: str) -> NameTable:
  hf_module = "encoder.layers.{i}." + module.replace("attn.", "self_attn.")
  return _pair(f"layers.{module}", hf_module, "kernel", transpose=True)


def _norm(module: str) -> NameTable:
  hf_module = "encoder.layers.{i}." + module
  return _pair(f"layers.{module}", hf_module, "scale", transpose=False)


# Parameters of a model that holds `vision_tower` and `multi_modal_projector`. A
# transposed tensor has all axes reversed: the patch kernel has four.
VISION: NameTable = {
  **_pair("patch_embedding", "embeddings.patch_embedding", "kernel", transpose=True),
  "vision_tower.position_embedding.embedding": HfName(
    f"{_TOWER}embeddings.position_embedding.weight"
  ),
  **_norm("layer_norm1"),
  **_linear("attn.q_proj"),
  **_linear("attn.k_proj"),
  **_linear("attn.v_proj"),
  **_linear("attn.out_proj"),
  **_norm("layer_norm2"),
  **_linear("mlp.fc1"),
  **_linear("mlp.fc2"),
  **_pair("post_layernorm", "post_layernorm", "scale", transpose=False),
  "multi_modal_projector.mm_soft_emb_norm.scale": HfName(
    f"{_PROJECTOR}mm_soft_emb_norm.weight"
  ),
  "multi_modal_projector.mm_input_projection.kernel": HfName(
    f"{_PROJECTOR}mm_input_projection_weight"
  ),
}

# SigLIP's pooling head, which Gemma 3 does not use, and a buffer of old writers.
HARMLESS_VISION = (
  re.escape(_TOWER) + r"head\..*",
  re.escape(_TOWER) + r"embeddings\.position_ids",
)

_SPELLINGS = (
  (re.compile(r"^(?:model\.)?vision_tower\.(?:vision_model\.)?"), _TOWER),
  (re.compile(r"^(?:model\.)?multi_modal_projector\."), _PROJECTOR),
  (re.compile(r"^model\.language_model\."), f"{_TEXT}model."),
  (re.compile(r"^lm_head\."), f"{_TEXT}lm_head."),
)


def canonical_key(key: str) -> str:
  """Returns a tensor's name in the spelling of the published checkpoints.

  It is meant for checkpoints with images. Names of a text model ("model.layers...") are
  returned unchanged, except "lm_head".
  """
  for pattern, prefix in _SPELLINGS:
    key, replaced = pattern.subn(prefix, key)
    if replaced:
      break
  return key


def nested_text(names: NameTable) -> NameTable:
  """Returns a text family's name table for a checkpoint that nests the text model."""
  return {
    path: HfName(_TEXT + name.key, name.transpose) for path, name in names.items()
  }


# Field -> (field of vision_config, its default in transformers' SiglipVisionConfig).
_VISION_FIELDS = {
  "num_layers": ("num_hidden_layers", 12),
  "embed_dim": ("hidden_size", 768),
  "hidden_dim": ("intermediate_size", 3072),
  "num_heads": ("num_attention_heads", 12),
  "patch_size": ("patch_size", 16),
  "image_size": ("image_size", 224),
}
_VISION_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
  "model_type": ("siglip_vision_model",),
  "hidden_act": ("gelu_pytorch_tanh",),
  "num_channels": (CHANNELS,),
  "attention_dropout": (0, None),
}


def vision_config_from_hf(hf: HfConfig, **options: Any) -> VisionConfig:
  """Returns the `VisionConfig` of a `config.json` with model_type "gemma3".

  Args:
    hf: the whole parsed file.
    options: fields that the file does not hold (dtypes, remat, sharding).

  Raises:
    ValueError: `vision_config` is missing, or has a setting that the tower does not
      support.
  """
  vision = _section(hf, "vision_config")
  check_supported(vision, _VISION_SUPPORTED, "vision_config.")
  sizes = {
    field: integer({hf_field: default, **vision}, hf_field)
    for field, (hf_field, default) in _VISION_FIELDS.items()
  }
  return VisionConfig(
    **sizes,
    norm_eps=number(vision, "layer_norm_eps", 1e-6),
    tokens_per_image=integer({"mm_tokens_per_image": 256, **hf}, "mm_tokens_per_image"),
    **options,
  )


def image_tokens_from_hf(hf: HfConfig, **options: Any) -> ImageTokens:
  """Returns the token ids around an image; absent ids are Gemma 3's.

  Args:
    hf: the whole parsed `config.json`. Both `image_token_index` and the newer
      `image_token_id` are read.
    options: further fields of `ImageTokens`: `newlines` for another vocabulary.

  Raises:
    ValueError: an id is no whole number, or two ids are equal.
  """
  default = ImageTokens()
  ids = {"boi": default.start, "image": default.soft, "eoi": default.end}
  for name in ids:
    for field in (f"{name}_token_index", f"{name}_token_id"):
      if hf.get(field) is not None:
        ids[name] = integer(hf, field, checks.NOT_NEGATIVE)
        break
  return ImageTokens(
    start=ids["boi"],
    soft=ids["image"],
    end=ids["eoi"],
    per_image=integer({"mm_tokens_per_image": 256, **hf}, "mm_tokens_per_image"),
    **options,
  )


def text_config(hf: HfConfig) -> dict[str, Any]:
  """Returns the `text_config` section, completed by fields of the whole file.

  Published files give few fields in the section. The other fields are the text family's
  defaults (those of transformers' Gemma3TextConfig).

  Raises:
    ValueError: the section is missing.
  """
  above = ("torch_dtype", "dtype", "quantization_config")
  inherited = {name: hf[name] for name in above if name in hf}
  # transformers writes the default of tie_word_embeddings into the section, so only the
  # value of the whole file is read.
  tied = {"tie_word_embeddings": hf.get("tie_word_embeddings", True)}
  return {**inherited, **_section(hf, "text_config"), **tied}


def config_to_hf(
  vision: VisionConfig, tokens: ImageTokens, text: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the `config.json` of a multimodal model.

  Args:
    vision: the configuration of the tower.
    tokens: the token ids around an image.
    text: the text model's `config.json`, with model_type "gemma3_text".
  """
  dtype = jnp.dtype(vision.param_dtype).name
  sizes = {
    hf_field: getattr(vision, field) for field, (hf_field, _) in _VISION_FIELDS.items()
  }
  return {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "dtype": dtype,
    "torch_dtype": dtype,
    "mm_tokens_per_image": vision.tokens_per_image,
    "boi_token_index": tokens.start,
    "image_token_index": tokens.soft,
    "eoi_token_index": tokens.end,
    "tie_word_embeddings": text.get("tie_word_embeddings", True),
    "text_config": dict(text),
    "vision_config": {
      **{field: accepted[0] for field, accepted in _VISION_SUPPORTED.items()},
      **sizes,
      "layer_norm_eps": vision.norm_eps,
      "vision_use_head": False,
      "dtype": dtype,
    },
  }


def _section(hf: HfConfig, name: str) -> Mapping[str, Any]:
  section = hf.get(name)
  if not isinstance(section, Mapping):
    raise ValueError(
      f"{name} is {section!r}, expected a table: this config.json is not of a Gemma 3 "
      "model with images"
    )
  return section
