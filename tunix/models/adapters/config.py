"""Reader of PEFT's `adapter_config.json`, which refuses settings it cannot reproduce.

Every field of PEFT 0.21's `LoraConfig` is in one of three groups: fields that are read,
fields that do not affect the adapter's function, and fields that are accepted only with
a value that changes nothing. A field of another PEFT version is accepted only if it is
empty, because an unknown field may change numbers.
"""

from __future__ import annotations

import logging
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tunix.models.transformer.hf import values as hf_values
from tunix.utils import checks, patterns

_log = logging.getLogger(__name__)

# Fields that this module and files.py read.
READ = frozenset(
  ("peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora")
  + ("rank_pattern", "alpha_pattern", "init_lora_weights")
  + ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
  + ("modules_to_save", "trainable_token_indices")
)
# The fields that select modules, and the kinds of their values. Every entry is compared
# with the name of every module.
_SELECTORS: Mapping[str, tuple[type, ...]] = {
  "target_modules": (str, list),
  "exclude_modules": (str, list),
  "layers_pattern": (str, list),
  "layers_to_transform": (int, list),
  "modules_to_save": (list,),
  "target_parameters": (list,),
  "trainable_token_indices": (list, dict),
  "rank_pattern": (dict,),
  "alpha_pattern": (dict,),
}
_KIND_NAMES = {str: "a text", list: "a list", int: "a whole number", dict: "a table"}
_MOST_ENTRIES = 4096

T = TypeVar("T")

# Fields that do not change the adapter's function: bookkeeping, settings of features
# that are refused, and settings of the random initialization.
WITHOUT_MEANING = frozenset(
  ("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision")
  + ("inference_mode", "runtime_config", "megatron_core", "qalora_group_size")
  + ("ensure_weight_tying", "loftq_config", "eva_config", "corda_config")
  + ("lora_ga_config",)
)

# Values of `init_lora_weights` that only choose initial values of A and B. Other
# methods also subtract the initial A B from the base weights.
_DRAWS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
_OF_ANOTHER_BASE = re.compile(r"(pissa|olora|corda|lora_ga)", re.IGNORECASE)

_MERGE = (
  "merge it with PEFT (merge_and_unload, then save_pretrained) and load the "
  "merged model"
)


def require_readable(path: pathlib.Path, peft: Mapping[str, Any]) -> None:
  """Refuses fields that select modules and are of another kind, or too long to search.

  Args:
    path: the path of `adapter_config.json`, for messages.
    peft: its contents.

  Raises:
    ValueError: the message names the field and what was expected.
  """
  for field, kinds in _SELECTORS.items():
    value = peft.get(field)
    if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
      expected = " or ".join(_KIND_NAMES[kind] for kind in kinds)
      raise ValueError(f"{path}: {field} is {value!r:.80}; expected {expected}")
    if isinstance(value, list) and not all(isinstance(x, str | int) for x in value):
      raise ValueError(f"{path}: {field} is {value!r:.80}; expected a list of texts")
    if isinstance(value, list | dict) and len(value) > _MOST_ENTRIES:
      raise ValueError(
        f"{path}: {field} has {len(value):,} entries; expected at most "
        f"{_MOST_ENTRIES:,}. Name the ends of the modules' names, such as 'q_proj'"
      )


def require_exact(path: pathlib.Path, peft: Mapping[str, Any]) -> None:
  """Refuses an adapter whose output would differ from PEFT's.

  Args:
    path: the path of `adapter_config.json`, for messages.
    peft: its contents.

  Raises:
    ValueError: a field has an unsupported value; the message gives both and a remedy.
  """
  if peft.get("peft_type", "LORA") != "LORA":
    raise ValueError(f"{path}: peft_type is {peft['peft_type']!r}, expected 'LORA'")
  dropout = peft.get("lora_dropout") or 0.0
  checks.number(f"{path}: lora_dropout", dropout, checks.Range(0, 1, below=True))
  _require_same_base(path, peft.get("init_lora_weights", True))
  for field, value in peft.items():
    if field in READ | WITHOUT_MEANING or not value or value == "none":
      continue
    remedy = "only PEFT and engines that know it run such an adapter"
    if (
      field != "alora_invocation_tokens"
    ):  # aLoRA cannot be merged: it depends on the prompt
      remedy = _MERGE
    raise ValueError(
      f"{path}: {field} is {value!r}, which is not supported, and without it the "
      f"adapter computes other numbers: {remedy}"
    )
  if peft.get("init_lora_weights") == "mica":
    _log.warning(
      "%s: MiCA is read as plain LoRA, which computes the same outputs. Further "
      "training differs, because PEFT freezes B",
      path,
    )


def _require_same_base(path: pathlib.Path, init: object) -> None:
  """Refuses an adapter that belongs to changed base weights, not the published ones."""
  if init in _DRAWS:
    return
  remedy = _MERGE
  if isinstance(init, str) and _OF_ANOTHER_BASE.match(init):
    remedy = (
      "convert it to plain LoRA with PEFT (save_pretrained(folder, "
      "path_initial_model_for_weight_conversion=the adapter before training)), or "
      + _MERGE
    )
  raise ValueError(
    f"{path}: init_lora_weights is {init!r}: the weights of the base model were "
    "changed before training, so the adapter does not fit the published weights; "
    f"{remedy}"
  )


def rank_alpha(peft: Mapping[str, Any], name: str) -> tuple[int, float]:
  """Returns the rank and alpha of one module.

  Args:
    peft: the contents of `adapter_config.json`.
    name: the module's name as PEFT's tensors spell it.

  Raises:
    ValueError: a value is missing or is no number in range.
  """
  rank = _by_pattern(peft, "rank_pattern", "r", name, hf_values.integer)
  alpha = _by_pattern(peft, "alpha_pattern", "lora_alpha", name, _any_number)
  return rank, alpha


def _by_pattern(
  peft: Mapping[str, Any],
  table: str,
  field: str,
  name: str,
  read: Callable[[Mapping[str, Any], str], T],
) -> T:
  """Returns the value of the first pattern that matches the end of a module's name.

  Without a match it is the value of `field`. This is PEFT's rule.
  """
  values = hf_values.table(peft, table)
  for pattern in values:
    if _selects(table, rf"(.*\.)?({pattern})", name):
      return read(values, pattern)
  return read(peft, field)


def _selects(field: str, pattern: str, name: str) -> bool:
  """Returns True if a pattern of a field matches a whole name."""
  try:
    return patterns.matches(pattern, name)
  except ValueError as error:
    raise ValueError(f"{field}: {error}") from error


def _any_number(peft: Mapping[str, Any], field: str) -> float:
  return hf_values.number(peft, field, within=checks.ANY)


def require_targeted(peft: Mapping[str, Any], name: str) -> None:
  """Refuses tensors of a module that the configuration does not select.

  PEFT ignores these tensors without a message, so either the configuration or the
  tensors of the folder are wrong.

  Args:
    peft: the contents of `adapter_config.json`.
    name: the module's name as PEFT's tensors spell it.

  Raises:
    ValueError: the configuration does not select the module.
  """
  targets, indices = peft.get("target_modules"), peft.get("layers_to_transform")
  chosen = targets in (None, "all-linear") or _named(peft, "target_modules", name)
  by_end = isinstance(targets, list) and name not in targets
  if chosen and by_end and indices not in (None, []):
    layer = _layer_of(peft, name)
    chosen = layer in (indices if isinstance(indices, list) else [indices])
  if not chosen or _named(peft, "exclude_modules", name):
    raise ValueError(
      f"the file holds an adapter of {name!r}, which target_modules, exclude_modules "
      "or layers_to_transform of adapter_config.json leave out, so that PEFT ignores "
      "it: correct the config, or take the tensors out"
    )


def _layer_of(peft: Mapping[str, Any], name: str) -> int | None:
  """Returns the number of a module's layer: the first one after a layers' pattern."""
  forms = peft.get("layers_pattern") or r"[^.]*"
  parts = name.split(".")
  for pattern in [forms] if isinstance(forms, str) else forms:
    for i in range(1, len(parts) - 1):
      before = ".".join(parts[:i])
      if parts[i].isdecimal() and _selects(
        "layers_pattern", rf"(?:.*\.)?(?:{pattern})", before
      ):
        return int(parts[i])
  return None


def _named(peft: Mapping[str, Any], field: str, name: str) -> bool:
  """Returns True if a field of modules selects a module.

  A list holds ends of names; a string is a regular expression for a whole name.
  """
  targets = peft.get(field) or []
  if isinstance(targets, str):
    return _selects(field, targets, name)
  return any(name == x or name.endswith(f".{x}") for x in targets)
