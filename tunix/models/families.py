"""The model families: which class, which names, which sizes.

A family is data. Users add one without editing this package: build a `Family` and pass
it as `family=` to `AutoModel` and to the saver.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from tunix.models.gemma import model as gemma, params as gemma_params
from tunix.models.gemma3 import (
  model as gemma3,
  multimodal,
  multimodal_params,
  params as gemma3_params,
)
from tunix.models.llama3 import model as llama3, params as llama3_params
from tunix.models.mistral import model as mistral, params as mistral_params
from tunix.models.olmo2 import model as olmo2, params as olmo2_params
from tunix.models.qwen2 import model as qwen2, params as qwen2_params
from tunix.models.qwen3 import model as qwen3, params as qwen3_params
from tunix.models.transformer.config import TransformerConfig
from tunix.models.transformer.model import Transformer
from tunix.models.transformer.params import HARMLESS, NameTable

Preset = Callable[..., TransformerConfig]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """What loading and saving must know about a kind of model: one of ours, or any module
  of a user's with a dataclass for a config.

  Attributes:
    name: for messages and the command line.
    model_types: values of `model_type` in `config.json` that mean this family.
    config_class: its configuration, a dataclass; with fields `dtype` and `param_dtype`
      it is told those of the checkpoint.
    model_class: built as `model_class(config, rngs=...)`.
    names: parameter path -> Hugging Face tensor, see `transformer.params.place`.
    config_from_hf: reads a parsed `config.json`; raises ValueError for what the family
      cannot do.
    config_to_hf: writes one.
    harmless: regular expressions of tensors that a checkpoint may hold in vain.
    presets: named sizes; each takes fields to override.
    canonical_key: a tensor's name in a checkpoint -> its name in `names`, for kinds of
      model whose checkpoints come in several spellings.
  """

  name: str
  model_types: tuple[str, ...]
  config_class: type[Any]
  model_class: Callable[..., Any]
  names: NameTable
  config_from_hf: Callable[[Mapping[str, Any]], Any]
  config_to_hf: Callable[[Any], dict[str, Any]]
  harmless: tuple[str, ...] = HARMLESS
  presets: Mapping[str, Preset] = dataclasses.field(default_factory=dict)
  canonical_key: Callable[[str], str] = lambda key: key


def _presets(config_class: type, *prefixes: str) -> dict[str, Preset]:
  """The class methods of a config whose names begin so."""
  return {
    name: getattr(config_class, name)
    for name in sorted(vars(config_class))
    if name.startswith(prefixes)
  }


def _qwen3_presets() -> dict[str, Preset]:
  presets = _presets(qwen3.ModelConfig, "qwen3_")
  # The base checkpoints have the same weights' shapes and a shorter context.
  for size in ("0p6b", "1p7b", "4b", "8b", "14b"):
    presets[f"qwen3_{size}_base"] = functools.partial(
      presets[f"qwen3_{size}"], max_position=32_768
    )
  return presets


def _family(
  name: str,
  model_types: tuple[str, ...],
  model_class: Callable[..., Transformer],
  model: ModuleType,
  params: ModuleType,
  presets: Mapping[str, Preset],
) -> Family:
  """A family of this package, from the two modules that describe it."""
  return Family(
    name=name,
    model_types=model_types,
    config_class=model.ModelConfig,
    model_class=model_class,
    names=params.NAMES,
    config_from_hf=params.config_from_hf,
    config_to_hf=params.config_to_hf,
    presets=presets,
  )


_ALL = (
  _family(
    "gemma",
    ("gemma", "gemma2"),
    gemma.Gemma,
    gemma,
    gemma_params,
    _presets(gemma.ModelConfig, "gemma"),
  ),
  _family(
    "gemma3",
    ("gemma3_text",),
    gemma3.Gemma3,
    gemma3,
    gemma3_params,
    _presets(gemma3.ModelConfig, "gemma3_270m", "gemma3_1b"),
  ),
  Family(
    name="gemma3_multimodal",
    model_types=("gemma3",),
    config_class=multimodal.MultimodalConfig,
    model_class=multimodal.MultimodalGemma3,
    names=multimodal_params.NAMES,
    config_from_hf=multimodal_params.config_from_hf,
    config_to_hf=multimodal_params.config_to_hf,
    harmless=multimodal_params.HARMLESS,
    presets={
      name: getattr(multimodal.MultimodalConfig, name)
      for name in _presets(gemma3.ModelConfig, *multimodal.SIZES)
    },
    canonical_key=multimodal_params.canonical_key,
  ),
  _family(
    "llama3",
    ("llama",),
    llama3.Llama3,
    llama3,
    llama3_params,
    _presets(llama3.ModelConfig, "llama3"),
  ),
  _family(
    "mistral",
    ("mistral",),
    mistral.Mistral,
    mistral,
    mistral_params,
    _presets(mistral.ModelConfig, "mistral"),
  ),
  _family(
    "olmo2",
    ("olmo2",),
    olmo2.Olmo2,
    olmo2,
    olmo2_params,
    _presets(olmo2.ModelConfig, "olmo2"),
  ),
  _family(
    "qwen2",
    ("qwen2",),
    qwen2.Qwen2,
    qwen2,
    qwen2_params,
    _presets(qwen2.ModelConfig, "qwen2", "deepseek"),
  ),
  _family(
    "qwen3",
    ("qwen3", "qwen3_moe"),
    qwen3.Qwen3,
    qwen3,
    qwen3_params,
    _qwen3_presets(),
  ),
)

FAMILIES: Mapping[str, Family] = {family.name: family for family in _ALL}


def by_model_type(model_type: Any) -> Family:
  """The family of a `config.json`.

  Raises:
    ValueError: no family has this model_type; the message lists those there are.
  """
  for family in FAMILIES.values():
    if model_type in family.model_types:
      return family
  known = sorted(t for family in FAMILIES.values() for t in family.model_types)
  raise ValueError(
    f"model_type {model_type!r} is unknown, known are {known}: pass family=Family(...) "
    "to load another kind of model"
  )


def of_config(config: TransformerConfig) -> Family:
  """The family of a configuration, by its class.

  Raises:
    ValueError: the class belongs to no family.
  """
  for family in FAMILIES.values():
    if type(config) is family.config_class:
      return family
  for family in FAMILIES.values():
    if isinstance(config, family.config_class):
      return family
  raise ValueError(
    f"{type(config).__module__}.{type(config).__name__} belongs to no family of "
    f"{sorted(FAMILIES)}: use a family's ModelConfig, or pass family=Family(...)"
  )


def preset(name: str) -> tuple[Family, Preset]:
  """A named size and its family.

  Raises:
    ValueError: no such preset; the message lists those there are.
  """
  for family in FAMILIES.values():
    if name in family.presets:
      return family, family.presets[name]
  known = sorted(name for family in FAMILIES.values() for name in family.presets)
  raise ValueError(f"preset {name!r} is unknown, known are {', '.join(known)}")
