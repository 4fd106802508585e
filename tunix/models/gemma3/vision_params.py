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
from tunix.models.gemma3.vision import VisionConfig
from tunix.models.transformer.hf.values import HfConfig, integer
from tunix.models.transformer.params import HfName, NameTable
from tunix.models.vision import params as tower_params
from tunix.utils import checks

_TOWER = "vision_tower.vision_model."
_PROJECTOR = "multi_modal_projector."
_TEXT = "language_model."


# Parameters of a model that holds `vision_tower` and `multi_modal_projector`.
VISION: NameTable = {
  **tower_params.siglip_names(_TOWER),
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


def module_key(key: str) -> str:
  """Returns the name of a tensor among the modules of transformers."""
  if key.startswith(f"{_TEXT}model."):
    return key.replace(f"{_TEXT}model.", "model.language_model.", 1)
  key = key.removeprefix(_TEXT)
  if key.startswith(_TOWER):
    return key.replace(_TOWER, "model.vision_tower.", 1)
  return f"model.{key}" if key.startswith(_PROJECTOR) else key


def nested_text(names: NameTable) -> NameTable:
  """Returns a text family's name table for a checkpoint that nests the text model."""
  return {
    path: HfName(_TEXT + name.key, name.transpose) for path, name in names.items()
  }


# Values of absent fields, those of transformers' SiglipVisionConfig.
_VISION_DEFAULTS = {
  "num_hidden_layers": 12,
  "hidden_size": 768,
  "intermediate_size": 3072,
  "num_attention_heads": 12,
  "patch_size": 16,
  "image_size": 224,
}
_TYPE = "siglip_vision_model"


def vision_config_from_hf(hf: HfConfig, **options: Any) -> VisionConfig:
  """Returns the `VisionConfig` of a `config.json` with model_type "gemma3".

  Args:
    hf: the whole parsed file.
    options: fields that the file does not hold (dtypes, remat, sharding).

  Raises:
    ValueError: `vision_config` is missing, or has a setting that the tower does not
      support.
  """
  return VisionConfig(
    **tower_params.read_siglip(hf, _VISION_DEFAULTS, _TYPE),
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
  return tower_params.text_section(hf, tied=True)


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
      **tower_params.write_siglip(vision, _TYPE),
      "vision_use_head": False,
    },
  }
