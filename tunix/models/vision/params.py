"""Names of the towers' tensors, and the parts of `config.json` that towers share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from tunix.models.family import Family
from tunix.models.transformer.hf import config as hf_config
from tunix.models.transformer.hf.config import check_supported
from tunix.models.transformer.hf.values import HfConfig, integer, number, table
from tunix.models.transformer.params import HfName, NameTable
from tunix.models.vision.config import CHANNELS, VisionLanguageConfig
from tunix.models.vision.pixtral import PixtralConfig
from tunix.models.vision.siglip import SiglipConfig
from tunix.utils.setting import named_values


def affine(path: str, key: str, weight: str = "kernel") -> NameTable:
  """Returns the entries of a weight and its bias.

  Args:
    path: our path of the module.
    key: name of the module in the checkpoint.
    weight: our name of the weight; a "kernel" is transposed.
  """
  return {
    f"{path}.{weight}": HfName(f"{key}.weight", weight == "kernel"),
    f"{path}.bias": HfName(f"{key}.bias"),
  }


def siglip_names(prefix: str) -> NameTable:
  """Returns the table of a SigLIP tower.

  A transposed tensor has all axes reversed: the patch kernel has four.

  Args:
    prefix: beginning of the tower's tensor names, with a dot.
  """
  layer, embeddings = f"{prefix}encoder.layers.{{i}}.", f"{prefix}embeddings."
  names = {
    **affine("vision_tower.patch_embedding", f"{embeddings}patch_embedding"),
    "vision_tower.position_embedding.embedding": HfName(
      f"{embeddings}position_embedding.weight"
    ),
    **affine("vision_tower.post_layernorm", f"{prefix}post_layernorm", "scale"),
  }
  for norm in ("layer_norm1", "layer_norm2"):
    names |= affine(f"vision_tower.layers.{norm}", f"{layer}{norm}", "scale")
  for linear in ("q_proj", "k_proj", "v_proj", "out_proj"):
    key = f"{layer}self_attn.{linear}"
    names |= affine(f"vision_tower.layers.attn.{linear}", key)
  for linear in ("fc1", "fc2"):
    names |= affine(f"vision_tower.layers.mlp.{linear}", f"{layer}mlp.{linear}")
  return names


# Field -> field of vision_config.
_SIZES = {
  "num_layers": "num_hidden_layers",
  "embed_dim": "hidden_size",
  "hidden_dim": "intermediate_size",
  "num_heads": "num_attention_heads",
  "patch_size": "patch_size",
  "image_size": "image_size",
}
_SIGLIP: Mapping[str, tuple[Any, ...]] = {
  "hidden_act": ("gelu_pytorch_tanh",),
  "num_channels": (CHANNELS,),
  "attention_dropout": (0, None),
}


def read_siglip(
  hf: HfConfig, defaults: Mapping[str, int], *model_types: str
) -> dict[str, Any]:
  """Returns the arguments of a `SiglipConfig` from the section `vision_config`.

  Args:
    hf: the whole parsed `config.json`.
    defaults: values of absent fields, by their names in the section.
    model_types: accepted values of the section's `model_type`.

  Raises:
    ValueError: the section is missing, or has a setting that the tower does not
      support.
  """
  vision = section(hf, "vision_config")
  check_supported(vision, {"model_type": model_types, **_SIGLIP}, "vision_config.")
  sizes = {
    field: integer({**defaults, **vision}, name) for field, name in _SIZES.items()
  }
  return sizes | {"norm_eps": number(vision, "layer_norm_eps", 1e-6)}


def write_siglip(config: SiglipConfig, model_type: str) -> dict[str, Any]:
  """Returns the section `vision_config` of a SigLIP tower."""
  sizes = {_SIZES[k]: v for k, v in named_values(config, _SIZES).items()}
  return {
    "model_type": model_type,
    **{field: accepted[0] for field, accepted in _SIGLIP.items()},
    **sizes,
    "layer_norm_eps": config.norm_eps,
    "dtype": jnp.dtype(config.param_dtype).name,
  }


def pixtral_names(prefix: str) -> NameTable:
  """Returns the table of a Pixtral tower, see `siglip_names`."""
  layer = f"{prefix}transformer.layers.{{i}}."
  ours = "vision_tower.layers."
  names = {
    "vision_tower.patch_embedding.kernel": HfName(f"{prefix}patch_conv.weight", True),
    "vision_tower.ln_pre.scale": HfName(f"{prefix}ln_pre.weight"),
    f"{ours}layer_norm1.scale": HfName(f"{layer}attention_norm.weight"),
    f"{ours}layer_norm2.scale": HfName(f"{layer}ffn_norm.weight"),
  }
  for name, key in {"q": "q", "k": "k", "v": "v", "out": "o"}.items():
    names[f"{ours}attn.{name}_proj.kernel"] = HfName(
      f"{layer}attention.{key}_proj.weight", True
    )
  for name in ("gate", "up", "down"):
    key = f"{layer}feed_forward.{name}_proj.weight"
    names[f"{ours}mlp.{name}_proj.kernel"] = HfName(key, True)
  return names


_PIXTRAL: Mapping[str, tuple[Any, ...]] = {
  "model_type": ("pixtral",),
  "num_channels": (CHANNELS,),
  "attention_dropout": (0, None),
}


def read_pixtral(hf: HfConfig, defaults: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the arguments of a `PixtralConfig`, see `read_siglip`."""
  vision = {**defaults, **section(hf, "vision_config")}
  check_supported(vision, _PIXTRAL, "vision_config.")
  sizes = {field: integer(vision, name) for field, name in _SIZES.items()}
  head_dim = vision.get("head_dim")
  if head_dim not in (None, sizes["embed_dim"] // sizes["num_heads"]):
    raise ValueError(
      f"vision_config.head_dim is {head_dim!r}, expected hidden_size / "
      "num_attention_heads: leave it out"
    )
  rope = {"rope_theta": vision.get("rope_theta"), **table(vision, "rope_parameters")}
  check_supported(rope, {"rope_type": ("axial", "default")}, "vision_config.")
  return sizes | {
    "activation": hf_config.read_activation(vision),
    "rope_theta": number(rope, "rope_theta", 10_000.0),
  }


def write_pixtral(config: PixtralConfig) -> dict[str, Any]:
  """Returns the section `vision_config` of a Pixtral tower."""
  sizes = {_SIZES[k]: v for k, v in named_values(config, _SIZES).items()}
  return {
    **{field: accepted[0] for field, accepted in _PIXTRAL.items()},
    **sizes,
    "head_dim": config.embed_dim // config.num_heads,
    "hidden_act": hf_config.write_activation(config.activation),
    "rope_parameters": {"rope_type": "axial", "rope_theta": config.rope_theta},
    "dtype": jnp.dtype(config.param_dtype).name,
  }


def section(hf: HfConfig, name: str) -> Mapping[str, Any]:
  """Returns a section of `config.json` that a model with images has.

  Raises:
    ValueError: the section is missing.
  """
  found = hf.get(name)
  if not isinstance(found, Mapping):
    raise ValueError(
      f"{name} is {found!r}, expected a table: this config.json is not of a model with "
      "images"
    )
  return found


def text_section(hf: HfConfig, *, tied: bool) -> dict[str, Any]:
  """Returns the section `text_config`, completed by fields of the whole file.

  transformers writes the default of `tie_word_embeddings` into the section, so only the
  value of the whole file is read.

  Args:
    hf: the whole parsed `config.json`.
    tied: value of an absent `tie_word_embeddings`.

  Raises:
    ValueError: the section is missing.
  """
  above = ("torch_dtype", "dtype", "quantization_config")
  inherited = {name: hf[name] for name in above if name in hf}
  ties = {"tie_word_embeddings": hf.get("tie_word_embeddings", tied)}
  return {**inherited, **section(hf, "text_config"), **ties}


def write_model(
  config: VisionLanguageConfig,
  model_type: str,
  architecture: str,
  text: Mapping[str, Any],
  vision: Mapping[str, Any],
) -> dict[str, Any]:
  """Returns the fields of `config.json` that all models of images and text have.

  Args:
    config: the model's configuration.
    model_type: value of `model_type`.
    architecture: beginning of the class's name in transformers, such as "SmolVLM".
    text: the text model's `config.json`.
    vision: the section of the tower.
  """
  hf: dict[str, Any] = {
    "architectures": [f"{architecture}ForConditionalGeneration"],
    "model_type": model_type,
    "tie_word_embeddings": config.tie_embeddings,
    "text_config": dict(text),
    "vision_config": dict(vision),
  }
  hf |= {name: text[name] for name in ("dtype", "torch_dtype")}
  if config.num_scores is not None:
    hf |= hf_config.write_scores(config, f"{architecture}ForCausalLM")
  return hf


def with_text_only(
  family: Family, multimodal: Family, prefixes: Mapping[str, str], towers: str
) -> Family:
  """Returns a multimodal family that can leave the tower out, see `Family.text_only`.

  Args:
    family: the family of the text model, which such a model is saved as.
    multimodal: the family of the whole model.
    prefixes: beginnings of tensor names, and what they are in the text model.
    towers: a regular expression of the names of the tensors that are left out.
  """

  def canonical_key(key: str) -> str:
    for prefix, plain in prefixes.items():
      if key.startswith(prefix):
        return plain + key.removeprefix(prefix)
    return key

  def read(hf: HfConfig) -> Any:
    fields = vars(multimodal.config_from_hf(hf))
    own = {field.name for field in dataclasses.fields(family.config_class)}
    return family.config_class(**{k: v for k, v in fields.items() if k in own})

  text_only = dataclasses.replace(
    family,
    model_types=multimodal.model_types,
    config_from_hf=read,
    canonical_key=canonical_key,
    harmless=(*family.harmless, towers),
  )
  return dataclasses.replace(multimodal, text_only=text_only)
