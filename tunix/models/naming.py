"""From the name of a checkpoint on the hub to our family and preset.

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
# What makers put before the family's name.
_PREFIXES = ("meta-", "mistralai-")
# What does not change a model's shape; tried last, so that presets of their own win.
_VARIANTS = ("_instruct", "_it", "_pt", "_base", "_chat", "_hf")
# Names that do not say their size, or say a date before it.
_IRREGULAR = {
  "mistral-nemo-base-2407": "mistral_nemo_12b",
  "mistral-nemo-instruct-2407": "mistral_nemo_12b",
  "olmo-2-0425-1b": "olmo2_1b",
  "olmo-2-1124-7b": "olmo2_7b",
  "olmo-2-1124-13b": "olmo2_13b",
  "olmo-2-0325-32b": "olmo2_32b",
}


@dataclasses.dataclass(frozen=True)
class ModelNaming:
  """All the names of a model, from one of them.

  Attributes:
    model_id: of the hub, "owner/name"; or a preset's name.
    model_name: the lower-case name without its owner; given, or taken from `model_id`.
    model_family, model_version: the two parts of the name, dots written as "p".
    model_config_category: the package under `tunix.models` that has the family.
    model_config_id: the preset.

  Raises:
    ValueError: neither name was given, they contradict each other, or no preset fits.
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
  """ "meta-llama/Llama-3.1-8B" -> "llama-3.1-8b"; presets' names go through as well.

  Raises:
    ValueError: it is empty or ends in a slash.
  """
  name = model_id.rpartition("/")[2].lower()
  if not name:
    raise ValueError(f"model_id {model_id!r} has no name: expected 'owner/name'")
  for prefix in _PREFIXES:
    name = name.removeprefix(prefix)
  return name


def get_model_family_and_version(model_name: str) -> tuple[str, str]:
  """ "llama-3.1-8b" -> ("llama3p1", "8b")."""
  match = _FAMILY.fullmatch(model_name.lower())
  if match is None:
    family, _, version = model_name.lower().partition("_")
  else:
    family, version = match[1] + (match[2] or ""), match[3]
  return family.replace(".", "p"), version.replace(".", "p").replace("-", "_")


def get_model_config_id(model_name: str) -> str:
  """The preset of a name.

  Raises:
    ValueError: none fits; the message has the nearest ones.
  """
  name = model_name.lower()
  known = [preset for family in families.FAMILIES.values() for preset in family.presets]
  family, version = get_model_family_and_version(name)
  wanted = _IRREGULAR.get(name) or f"{family}_{version}".rstrip("_")
  for candidate in (wanted, *(wanted.removesuffix(end) for end in _VARIANTS)):
    if candidate in known:
      return candidate
  near = difflib.get_close_matches(wanted, known, 3) or sorted(known)
  raise ValueError(
    f"no preset is called {wanted!r} (from {model_name!r}); near are "
    f"{', '.join(near)}: load the folder with AutoModel.from_pretrained, which reads "
    "its config.json"
  )


def get_model_config_category(model_name: str) -> str:
  """The family's package, "llama3" of "llama-3.1-8b".

  Raises:
    ValueError: see `get_model_config_id`.
  """
  return families.preset(get_model_config_id(model_name))[0].name
