"""Checkpoints of Ministral 3 with images: `config.json`, tensor names and the family.

The tensors are spelled as in Gemma 3's folders, see `gemma3.vision_params`, and are
written in the spelling of the hub.
"""

from __future__ import annotations

import re
from typing import Any

from tunix.models.family import Family
from tunix.models.ministral3 import params as text_params
from tunix.models.ministral3.multimodal import MultimodalConfig, MultimodalMinistral3
from tunix.models.transformer import params
from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.hf import config as hf_config
from tunix.models.transformer.hf.values import flag, integer
from tunix.models.transformer.params import HfName, NameTable
from tunix.models.vision import params as tower_params
from tunix.models.vision.pixtral import PixtralConfig
from tunix.utils import checks

_TEXT, _PROJECTOR = "language_model.", "multi_modal_projector."
_LINEARS = {
  "merging_layer": "patch_merger.merging_layer",
  "linear_1": "linear_1",
  "linear_2": "linear_2",
}
NAMES: NameTable = {
  **tower_params.pixtral_names("vision_tower."),
  f"{_PROJECTOR}norm.scale": HfName(f"{_PROJECTOR}norm.weight"),
  **{
    path: name
    for ours, theirs in _LINEARS.items()
    for path, name in tower_params.affine(
      f"{_PROJECTOR}{ours}", f"{_PROJECTOR}{theirs}"
    ).items()
  },
  **{
    path: HfName(_TEXT + name.key, name.transpose)
    for path, name in params.DECODER.items()
  },
}

# Values of absent fields, those of transformers' PixtralVisionConfig.
_VISION_DEFAULTS = {
  "hidden_size": 1024,
  "intermediate_size": 4096,
  "num_hidden_layers": 24,
  "num_attention_heads": 16,
  "image_size": 1024,
  "patch_size": 16,
  "hidden_act": "gelu",
}
_SUPPORTED = {"vision_feature_layer": (-1,)}


def config_from_hf(hf: hf_config.HfConfig) -> MultimodalConfig:
  """Returns the `MultimodalConfig` of a `config.json` with model_type "mistral3".

  Raises:
    ValueError: see `ministral3.params.config_from_hf` and `vision.params`.
  """
  hf_config.check_supported(hf, _SUPPORTED)
  fields = vars(text_params.config_from_hf(hf))
  fields |= {"num_scores": hf_config.read_scores(hf)}
  ids = {"image_token_index": hf.get("image_token_id", 10), **hf}
  return MultimodalConfig(
    **fields,
    vision=PixtralConfig(**tower_params.read_pixtral(hf, _VISION_DEFAULTS)),
    merge=integer({"spatial_merge_size": 2, **hf}, "spatial_merge_size"),
    image_token_id=integer(ids, "image_token_index", checks.NOT_NEGATIVE),
    projector_activation=hf_config.read_activation(
      {"projector_hidden_act": "gelu", **hf}, "projector_hidden_act"
    ),
    projector_bias=flag(hf, "multimodal_projector_bias"),
  )


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
  """Returns the `config.json` of a Ministral 3 with images.

  Raises:
    ValueError: see `ministral3.params.config_to_hf`.
  """
  assert isinstance(config, MultimodalConfig)
  text = text_params.config_to_hf(config)
  vision = tower_params.write_pixtral(config.vision)
  hf = tower_params.write_model(config, "mistral3", "Mistral3", text, vision)
  return hf | {
    "spatial_merge_size": config.merge,
    "image_token_index": config.image_token_id,
    "projector_hidden_act": hf_config.write_activation(config.projector_activation),
    "multimodal_projector_bias": config.projector_bias,
    "vision_feature_layer": -1,
  }


def canonical_key(key: str) -> str:
  """Returns a tensor's name in the spelling of the hub.

  `ministral3.params.canonical_key` removes what nests the text model; here its names
  get the same beginning in all spellings.
  """
  plain = text_params.canonical_key(key)
  if plain.startswith(("model.vision_tower.", "model.multi_modal_projector.")):
    return plain.removeprefix("model.")
  is_text = re.match(r"(model|lm_head|score)\.", plain)
  return _TEXT + plain if is_text else plain


def module_key(key: str) -> str:
  """Returns the name of a tensor among the modules of transformers."""
  if key.startswith(f"{_TEXT}model."):
    return key.replace(f"{_TEXT}model.", "model.language_model.", 1)
  key = key.removeprefix(_TEXT)
  return f"model.{key}" if key.startswith(("vision_tower.", _PROJECTOR)) else key


FAMILY = Family(
  name="ministral3_multimodal",
  model_types=("mistral3",),
  config_class=MultimodalConfig,
  model_class=MultimodalMinistral3,
  names=NAMES,
  config_from_hf=config_from_hf,
  config_to_hf=config_to_hf,
  canonical_key=canonical_key,
  module_key=module_key,
  text_only=text_params.FAMILY,
)
