"""Derives the family and the preset from the name of a checkpoint on the hub.

"meta-llama/Llama-3.1-8B" -> name "llama-3.1-8b", family "llama3p1", version "8b",
category "llama3" (the package that has it), config id "llama3p1_8b" (the preset).
"""

from __future__ import annotations

import dataclasses
import difflib
import re

from tunix.models import families

# A family's letters and version number; "2b" and "270m" are sizes, no versions.
_FAMILY = re.compile(r"([a-z]+)-?(\d+(?:\.\d+)?)?(?![\d.]*[bm]\b)(?:-|$)(.*)")
# Makers' names that some repositories put before the family's name.
_PREFIXES = ("meta-", "mistralai-")
# Endings that do not change a model's shape. They are removed only if no preset has the
# full name, so that a preset such as qwen3_4b_instruct_2507 is found first.
_VARIANTS = ("_instruct", "_it", "_pt", "_base", "_chat", "_hf")


@dataclasses.dataclass(frozen=True)
class ModelNaming:
  """All names of a model, derived from `model_id` or from `model_name`.

  Attributes:
    model_id: the id on the hub, "owner/name", or the name of a preset.
    model_name: the lower-case name without its owner; taken from `model_id` if None.
    model_family, model_version: the two parts of the name, with dots written as "p".
    model_config_category: the package under `tunix.models` that holds the family.
    model_config_id: the name of the preset.

  Raises:
    ValueError: both names are None, they contradict each other, or no preset matches.
  """

  model_id: str | None = None
  model_name: str | None = None
  model_family: str = dataclasses.field(init=False)
  model_version: str = dataclasses.field(init=False)
  model_config_category: str = dataclasses.field(init=False)
  model_config_id: str = dataclasses.field(init=False)

  def __post_init__(self):
    if self.model_id is None and self.model_name is None:
      raise ValueError("give model_id ('owner/name') or model_name, both are None")
    derived = self.model_name
    if self.model_id is not None:
      derived = get_model_name_from_model_id(self.model_id)
      if self.model_name not in (None, derived):
        raise ValueError(
          f"model_id {self.model_id!r} means model_name {derived!r}, not "
          f"{self.model_name!r}: give one of the two"
        )
    assert derived is not None
    family, version = get_model_family_and_version(derived)
    values = {
      "model_name": derived,
      "model_family": family,
      "model_version": version,
      "model_config_category": get_model_config_category(derived),
      "model_config_id": get_model_config_id(derived),
    }
    for name, value in values.items():
      object.__setattr__(self, name, value)


def get_model_name_from_model_id(model_id: str) -> str:
  """Turns "meta-llama/Llama-3.1-8B" into "llama-3.1-8b".

  The name of a preset is returned unchanged.

  Raises:
    ValueError: the id is empty or ends in a slash.
  """
  name = model_id.rpartition("/")[2].lower()
  if not name:
    raise ValueError(f"model_id {model_id!r} has no name: expected 'owner/name'")
  for prefix in _PREFIXES:
    name = name.removeprefix(prefix)
  return name


def get_model_family_and_version(model_name: str) -> tuple[str, str]:
  """Splits "llama-3.1-8b" into ("llama3p1", "8b")."""
  match = _FAMILY.fullmatch(model_name.lower())
  if match is None:
    family, _, version = model_name.lower().partition("_")
  else:
    family, version = match[1] + (match[2] or ""), match[3]
  return family.replace(".", "p"), version.replace(".", "p").replace("-", "_")


def get_model_config_id(model_name: str) -> str:
  """Returns the name of the preset for a model's name.

  Raises:
    ValueError: no preset matches; the message lists the most similar ones.
  """
  name = model_name.lower()
  presets: list[str] = []
  for family in families.FAMILIES.values():
    if name in family.hub_names:
      return family.hub_names[name]
    presets += family.presets
  preset = "_".join(filter(None, get_model_family_and_version(name)))
  for candidate in (preset, *(preset.removesuffix(end) for end in _VARIANTS)):
    if candidate in presets:
      return candidate
  near = difflib.get_close_matches(preset, presets, 3) or sorted(presets)
  raise ValueError(
    f"no preset is called {preset!r} (from {model_name!r}); near are "
    f"{', '.join(near)}: load the folder with AutoModel.from_pretrained, which reads "
    "its config.json"
  )


def get_model_config_category(model_name: str) -> str:
  """Returns the name of the family's package: "llama3" for "llama-3.1-8b".

  Raises:
    ValueError: see `get_model_config_id`.
  """
  return families.preset(get_model_config_id(model_name))[0].name
