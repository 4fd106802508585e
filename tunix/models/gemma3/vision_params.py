"""The vision side of a Gemma 3 checkpoint: tensor names and `config.json`.

Checkpoints come in four spellings, all of which transformers 5.23 reads, writing each
back as it came. For the tensor "post_layernorm.weight" they are

  vision_tower.vision_model.     the published checkpoints (and what we write)
  vision_tower.                  transformers 5, a model made from a config
  model.vision_tower.            as its modules are called in memory
  model.vision_tower.vision_model.

with `language_model.model.` in the first two and `model.language_model.` in the others.
`canonical_key` turns all into the first, so that one name table does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from tunix.models.gemma3.image_tokens import ImageTokens
from tunix.models.gemma3.vision import CHANNELS, VisionConfig
from tunix.models.transformer.hf_config import HfConfig, integer, number
from tunix.models.transformer.params import HfName, NameTable

_TOWER = "vision_tower.vision_model."
_PROJECTOR = "multi_modal_projector."
_TEXT = "language_model."


def _pair(ours: str, theirs: str, weight: str, *, transpose: bool) -> NameTable:
  """A weight and its bias."""
  key = _TOWER + theirs
  return {
    f"vision_tower.{ours}.{weight}": HfName(f"{key}.weight", transpose),
    f"vision_tower.{ours}.bias": HfName(f"{key}.bias"),
  }


def _linear(module: str) -> NameTable:
  theirs = "encoder.layers.{i}." + module.replace("attn.", "self_attn.")
  return _pair(f"layers.{module}", theirs, "kernel", transpose=True)


def _norm(module: str) -> NameTable:
  theirs = "encoder.layers.{i}." + module
  return _pair(f"layers.{module}", theirs, "scale", transpose=False)


# Our path, of a model that holds `vision_tower` and `multi_modal_projector`. A
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
  """A tensor's name in the spelling of the published checkpoints.

  Names of a text-only checkpoint ("model.layers...") come back as they are, but for
  an untied "lm_head": apply it to checkpoints with images only.
  """
  for pattern, prefix in _SPELLINGS:
    key, replaced = pattern.subn(prefix, key)
    if replaced:
      break
  return key


def nested_text(names: NameTable) -> NameTable:
  """A text family's table for its weights inside a multimodal checkpoint."""
  return {
    path: HfName(_TEXT + name.key, name.transpose) for path, name in names.items()
  }


# What an absent field of vision_config means (transformers' SiglipVisionConfig).
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
  """`VisionConfig` of a `config.json` with model_type "gemma3".

  Args:
    hf: the whole parsed file.
    options: fields that it does not hold (dtypes, remat, sharding).

  Raises:
    ValueError: there is no `vision_config`, or it asks for something that the tower
      does not do.
  """
  vision = _section(hf, "vision_config")
  for field, accepted in _VISION_SUPPORTED.items():
    if field in vision and vision[field] not in accepted:
      raise ValueError(
        f"vision_config.{field} is {vision[field]!r}, supported is only "
        f"{accepted[0]!r}: this tower would compute something else"
      )
  sizes = {
    ours: integer({theirs: default, **vision}, theirs)
    for ours, (theirs, default) in _VISION_FIELDS.items()
  }
  return VisionConfig(
    **sizes,
    norm_eps=number(vision, "layer_norm_eps", 1e-6),
    tokens_per_image=integer({"mm_tokens_per_image": 256, **hf}, "mm_tokens_per_image"),
    **options,
  )


def image_tokens_from_hf(hf: HfConfig, **options: Any) -> ImageTokens:
  """The ids around an image; absent ones are Gemma 3's.

  Args:
    hf: the whole parsed `config.json`. Both `image_token_index` and the newer
      `image_token_id` are read.
    options: `newlines`, where the vocabulary is not Gemma's.

  Raises:
    ValueError: an id is no whole number, or two are equal.
  """
  default = ImageTokens()
  ids = {"boi": default.start, "image": default.soft, "eoi": default.end}
  for name in ids:
    for field in (f"{name}_token_index", f"{name}_token_id"):
      if hf.get(field) is not None:
        ids[name] = integer(hf, field)
        break
  return ImageTokens(
    start=ids["boi"],
    soft=ids["image"],
    end=ids["eoi"],
    per_image=integer({"mm_tokens_per_image": 256, **hf}, "mm_tokens_per_image"),
    **options,
  )


def text_config(hf: HfConfig) -> dict[str, Any]:
  """The `text_config` section, with what stands above it where it is silent.

  Published files give few fields there; the rest are the text family's defaults (those
  of transformers' Gemma3TextConfig).

  Raises:
    ValueError: there is no such section.
  """
  above = ("torch_dtype", "dtype", "quantization_config")
  inherited = {name: hf[name] for name in above if name in hf}
  # Whether the table is tied is said above alone: transformers writes its default here.
  tied = {"tie_word_embeddings": hf.get("tie_word_embeddings", True)}
  return {**inherited, **_section(hf, "text_config"), **tied}


def config_to_hf(
  vision: VisionConfig, tokens: ImageTokens, text: Mapping[str, Any]
) -> dict[str, Any]:
  """The `config.json` of a multimodal model.

  Args:
    vision: the tower.
    tokens: the ids.
    text: the text model's own `config.json`, with model_type "gemma3_text".
  """
  dtype = jnp.dtype(vision.param_dtype).name
  sizes = {
    theirs: getattr(vision, ours) for ours, (theirs, _) in _VISION_FIELDS.items()
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
