"""The model families of this package, and the lookups by model type, class and preset.

Adding a family to the package takes a folder with `model.py` (configuration and class)
and `params.py` (`config.json` and `FAMILY`), and one entry in `FAMILIES`. Users add one
without editing the package: they build a `Family` and pass it as `family=` to
`AutoModel` and to the saver.
"""

from __future__ import annotations

from collections.abc import Mapping

from tunix.models.deepseek_v3 import params as deepseek_v3
from tunix.models.family import Family as Family, Preset
from tunix.models.gemma import params as gemma
from tunix.models.gemma3 import multimodal_params, params as gemma3
from tunix.models.gemma4 import multimodal_params as gemma4_multimodal, params as gemma4
from tunix.models.glm4_moe_lite import params as glm4_moe_lite
from tunix.models.gpt_oss import params as gpt_oss
from tunix.models.granite import params as granite
from tunix.models.granite4 import params as granite4
from tunix.models.llama3 import params as llama3
from tunix.models.ministral3 import (
  multimodal_params as ministral3_multimodal,
  params as ministral3,
)
from tunix.models.mistral import params as mistral
from tunix.models.nemotron_h import params as nemotron_h
from tunix.models.olmo2 import params as olmo2
from tunix.models.olmo3 import params as olmo3
from tunix.models.phi3 import params as phi3
from tunix.models.qwen2 import params as qwen2
from tunix.models.qwen3 import params as qwen3
from tunix.models.qwen3_5 import multimodal as qwen3_5_multimodal, params as qwen3_5
from tunix.models.qwen3_5_moe import (
  multimodal as qwen3_5_moe_multimodal,
  params as qwen3_5_moe,
)
from tunix.models.qwen3_vl import model as qwen3_vl
from tunix.models.smollm3 import params as smollm3
from tunix.models.smolvlm import params as smolvlm
from tunix.models.transformer.config import TransformerConfig

FAMILIES: Mapping[str, Family] = {
  family.name: family
  for family in (
    deepseek_v3.FAMILY,
    gemma.FAMILY,
    gemma3.FAMILY,
    multimodal_params.FAMILY,
    gemma4.FAMILY,  # before the next one: it is the default for both
    gemma4_multimodal.FAMILY,
    glm4_moe_lite.FAMILY,
    gpt_oss.FAMILY,
    granite.FAMILY,
    granite4.FAMILY,
    llama3.FAMILY,
    ministral3.FAMILY,  # before the next one: it is the default for both
    ministral3_multimodal.FAMILY,
    mistral.FAMILY,
    nemotron_h.FAMILY,
    olmo2.FAMILY,
    olmo3.FAMILY,
    phi3.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    qwen3_5.FAMILY,
    qwen3_5_multimodal.FAMILY,
    qwen3_5_moe.FAMILY,
    qwen3_5_moe_multimodal.FAMILY,
    qwen3_vl.FAMILY,
    smollm3.FAMILY,
    smolvlm.FAMILY,
  )
}


def by_model_type(model_type: object, images: bool | None = None) -> Family:
  """Returns the family of a `config.json`.

  Args:
    model_type: the value of its field `model_type`.
    images: True for the family that loads the vision tower, False for the one that
      leaves it out, None for the first one of `FAMILIES`.

  Raises:
    ValueError: no family has this model type, the message lists the known ones; or
      images is True and only text is loaded.
  """
  found = [f for f in FAMILIES.values() if model_type in f.model_types]
  with_tower = [f for f in found if f.text_only is not None]
  if found and images and not with_tower:
    raise ValueError(
      f"images is True, and of model_type {model_type!r} only text is loaded; expected "
      "None or False: leave images out"
    )
  if found:
    family = (with_tower if images else found)[0]
    return family.text_only or family if images is False else family
  types = sorted(t for family in FAMILIES.values() for t in family.model_types)
  raise ValueError(
    f"model_type {model_type!r} is unknown, known are {types}: pass family=Family(...) "
    "to load another kind of model"
  )


def has_tower(model_type: object, images: bool | None = None) -> bool:
  """Returns True if a folder is loaded with a vision tower, see `by_model_type`."""
  found = [f for f in FAMILIES.values() if model_type in f.model_types]
  if images is None:
    found = found[:1]
  return images is not False and any(f.text_only is not None for f in found)


def of_config(config: TransformerConfig) -> Family:
  """Returns the family of a configuration, chosen by the configuration's class.

  Raises:
    ValueError: the class belongs to no family.
  """
  for family in FAMILIES.values():
    if type(config) is family.config_class:
      return family
  # A user's subclass of a model with images is also one of its text model.
  bases = [f for f in FAMILIES.values() if isinstance(config, f.config_class)]
  if bases:
    return max(bases, key=lambda family: len(family.config_class.__mro__))
  raise ValueError(
    f"{type(config).__module__}.{type(config).__name__} belongs to no family of "
    f"{sorted(FAMILIES)}: use a family's ModelConfig, or pass family=Family(...)"
  )


def preset(name: str) -> tuple[Family, Preset]:
  """Returns the family of a named size, and the function that makes its configuration.

  Raises:
    ValueError: no preset has this name; the message lists the known ones.
  """
  for family in FAMILIES.values():
    if name in family.presets:
      return family, family.presets[name]
  names = sorted(name for family in FAMILIES.values() for name in family.presets)
  raise ValueError(f"preset {name!r} is unknown, known are {', '.join(names)}")
