"""Checkpoints of the Qwens with images: `config.json`, tensor names and families."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from tunix.models.family import Family
from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.hf import config as hf_config
from tunix.models.transformer.hf.config import check_supported
from tunix.models.transformer.hf.values import (
  HfConfig,
  flag,
  integer,
  listed,
  number,
  table,
)
from tunix.models.transformer.params import HARMLESS, HfName, NameTable
from tunix.models.vision import params
from tunix.models.vision.config import CHANNELS
from tunix.models.vision.params import affine
from tunix.models.vision.qwen import FRAMES, QwenConfig, QwenImagesConfig
from tunix.utils import checks
from tunix.utils.setting import named_values

TEXT = "model.language_model."
MTP = r"mtp\..*"  # layers that predict further tokens

# Field -> field of vision_config, and transformers' value of an absent one.
_SIZES: Mapping[str, tuple[str, int]] = {
  "num_layers": ("depth", 27),
  "embed_dim": ("hidden_size", 1152),
  "hidden_dim": ("intermediate_size", 4304),
  "num_heads": ("num_heads", 16),
  "patch_size": ("patch_size", 16),
  "merge": ("spatial_merge_size", 2),
}
_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
  "hidden_act": ("gelu_pytorch_tanh",),
  "in_channels": (CHANNELS,),
  "temporal_patch_size": (FRAMES,),
}


def names(text: NameTable) -> NameTable:
  """Returns the table of a model, given that of its text model."""
  tower, block = "vision_tower.", "model.visual.blocks.{i}."
  linears = {"attn.qkv_proj": "attn.qkv", "attn.out_proj": "attn.proj"}
  linears |= {f"mlp.fc{i}": f"mlp.linear_fc{i}" for i in (1, 2)}
  out = {
    **affine(f"{tower}patch_embedding", "model.visual.patch_embed.proj"),
    f"{tower}position_embedding.embedding": HfName("model.visual.pos_embed.weight"),
    **_merger("multi_modal_projector.merger", "model.visual.merger"),
    **_merger(
      "multi_modal_projector.deepstack.{i}", "model.visual.deepstack_merger_list.{i}"
    ),
  }
  for ours, theirs in linears.items():
    out |= affine(f"{tower}layers.{ours}", f"{block}{theirs}")
  for i in (1, 2):
    out |= affine(f"{tower}layers.layer_norm{i}", f"{block}norm{i}", "scale")
  return out | {
    path: HfName(name.key.replace("model.", TEXT, 1), name.transpose)
    for path, name in text.items()
  }


def _merger(path: str, key: str) -> NameTable:
  return {
    **affine(f"{path}.norm", f"{key}.norm", "scale"),
    **affine(f"{path}.fc1", f"{key}.linear_fc1"),
    **affine(f"{path}.fc2", f"{key}.linear_fc2"),
  }


def _read_tower(
  hf: HfConfig, model_type: str, deepstack: tuple[int, ...]
) -> tuple[QwenConfig, int]:
  """Returns the tower, and the width of its soft tokens."""
  vision = params.section(hf, "vision_config")
  types = {"model_type": (f"{model_type}_vision", model_type)}
  if not deepstack:  # the family has none
    types |= {"deepstack_visual_indexes": ([], None)}
  check_supported(vision, types | _SUPPORTED, "vision_config.")
  sizes = {
    field: integer({name: usual, **vision}, name)
    for field, (name, usual) in _SIZES.items()
  }
  learned = integer({"n": 48**2, **vision}, "num_position_embeddings")
  edge = math.isqrt(learned)
  if edge**2 != learned:
    raise ValueError(
      f"vision_config.num_position_embeddings is {learned}; expected a square number, "
      "as the table of positions is a square. Correct config.json"
    )
  rope = table(vision, "rope_parameters")
  check_supported(rope, {"rope_type": ("axial", "default")}, "vision_config.")
  if vision.get("deepstack_visual_indexes") is not None:
    field = "deepstack_visual_indexes"
    layers = range(sizes["num_layers"])
    found = [{field: i} for i in listed(vision, field)]
    within = checks.Range(0, len(layers) - 1)
    deepstack = tuple(integer(one, field, within) for one in found)
  tower = QwenConfig(
    **sizes,
    table_size=edge,
    rope_theta=number(rope, "rope_theta", 10_000.0),
    deepstack=deepstack,
  )
  return tower, integer({"out_hidden_size": 3584, **vision}, "out_hidden_size")


def _write_tower(config: QwenImagesConfig, model_type: str) -> dict[str, Any]:
  tower = config.vision
  sizes = named_values(tower, _SIZES)
  return {
    "model_type": f"{model_type}_vision",
    **{field: accepted[0] for field, accepted in _SUPPORTED.items()},
    **{name: sizes[field] for field, (name, _) in _SIZES.items()},
    "out_hidden_size": config.embed_dim,
    "num_position_embeddings": tower.table_size**2,
    "deepstack_visual_indexes": [*tower.deepstack],
    "rope_parameters": {"rope_type": "axial", "rope_theta": tower.rope_theta},
    "dtype": jnp.dtype(config.param_dtype).name,
  }


def _read_sections(hf: HfConfig, usual: tuple[int, int, int]) -> tuple[int, int, int]:
  text = params.section(hf, "text_config")
  rope = table(text, "rope_scaling") or table(text, "rope_parameters")
  if not flag(rope, "mrope_interleaved", True):
    raise ValueError(
      "mrope_interleaved is false, supported is only true: rotary sections that follow "
      "each other are those of Qwen2-VL and Qwen2.5-VL, which are not offered"
    )
  field = "mrope_section"
  found: Any = tuple(
    integer({field: count}, field, checks.NOT_NEGATIVE) for count in listed(rope, field)
  )
  return found or usual


def family(
  text: Family,
  name: str,
  model_type: str,
  architecture: str,
  config_class: type[QwenImagesConfig],
  model_class: Callable[..., Any],
  deepstack: tuple[int, ...] = (),
) -> Family:
  """Returns a family of images and text.

  Args:
    text: the family of the text model, which reads the whole file and writes the
      section of the text model.
    name: name of the family.
    model_type: value of `model_type` in `config.json`.
    architecture: beginning of the class's name in transformers.
    config_class, model_class: the classes of the family.
    deepstack: transformers' value of an absent field, see `QwenConfig`; () for a family
      without deepstack.
  """

  usual = named_values(config_class, ("image_token_id", "mrope_sections"))

  def config_from_hf(hf: HfConfig) -> QwenImagesConfig:
    tower, width = _read_tower(hf, model_type, deepstack)
    fields: dict[str, Any] = vars(text.config_from_hf(hf)) | {
      "num_scores": hf_config.read_scores(hf)
    }
    if width != fields["embed_dim"]:
      raise ValueError(
        f"vision_config.out_hidden_size is {width}; expected {fields['embed_dim']}, "
        "the text model's hidden_size. Correct config.json"
      )
    return config_class(
      **fields,
      vision=tower,
      image_token_id=integer({**usual, **hf}, "image_token_id", checks.NOT_NEGATIVE),
      mrope_sections=_read_sections(hf, usual["mrope_sections"]),
    )

  def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    assert isinstance(config, QwenImagesConfig)
    section = text.config_to_hf(config)
    rope = section["rope_parameters"]
    rope |= {"mrope_section": [*config.mrope_sections], "mrope_interleaved": True}
    if "rope_scaling" in section:
      section["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    tower = _write_tower(config, model_type)
    hf = params.write_model(config, model_type, architecture, section, tower)
    return hf | {"image_token_id": config.image_token_id}

  return Family(
    name=name,
    model_types=(model_type,),
    config_class=config_class,
    model_class=model_class,
    names=names(text.names),
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    harmless=(
      *(x.replace("model", r"model\.language_model", 1) for x in HARMLESS),
      MTP,
    ),
    text_only=text,
  )
