"""What PEFT's `adapter_config.json` says, and whether we do exactly that.

Every field of PEFT 0.21's `LoraConfig` stands in one of three groups: read, without a
meaning for the function, or accepted only where it changes nothing. A field of another
version is accepted only where it is empty: what nobody here knows may change numbers.
"""

from __future__ import annotations

import logging
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from tunix.models.transformer import hf_config
from tunix.utils import checks

_log = logging.getLogger(__name__)

# `require_exact` and adapter_files.py read these.
READ = frozenset(
  ("peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora")
  + ("rank_pattern", "alpha_pattern", "init_lora_weights")
  + ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
  + ("modules_to_save",)
)
# Bookkeeping, and settings of a field that is refused or of a draw that is over.
WITHOUT_MEANING = frozenset(
  ("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision")
  + ("inference_mode", "runtime_config", "megatron_core", "qalora_group_size")
  + ("ensure_weight_tying", "loftq_config", "eva_config", "corda_config")
  + ("lora_ga_config",)
)

# A draw of A and B leaves the base alone; these took A B out of its weights first.
_DRAWS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
_OF_ANOTHER_BASE = re.compile(r"(pissa|olora|corda|lora_ga)", re.IGNORECASE)

_MERGE = (
  "merge it with PEFT (merge_and_unload, then save_pretrained) and load the "
  "merged model"
)


def require_exact(path: pathlib.Path, peft: Mapping[str, Any]) -> None:
  """Refuses an adapter that would compute something else here than in PEFT.

  Args:
    path: of the file, for messages.
    peft: its contents.

  Raises:
    ValueError: names the field, its value and the way out.
  """
  if peft.get("peft_type", "LORA") != "LORA":
    raise ValueError(f"{path}: peft_type is {peft['peft_type']!r}, expected 'LORA'")
  dropout = peft.get("lora_dropout") or 0.0
  checks.number(f"{path}: lora_dropout", dropout, checks.Range(0, 1, below=True))
  _require_same_base(path, peft.get("init_lora_weights", True))
  for field, value in peft.items():
    if field in READ | WITHOUT_MEANING or not value or value == "none":
      continue
    way = "only PEFT and engines that know it run such an adapter"
    if field != "alora_invocation_tokens":  # its weights depend on the prompt
      way = _MERGE
    raise ValueError(
      f"{path}: {field} is {value!r}, which is not done here, and without it the "
      f"adapter gives other numbers: {way}"
    )
  if peft.get("init_lora_weights") == "mica":
    _log.warning(
      "%s: MiCA is read as plain LoRA, which computes the same; trained on, it "
      "differs: PEFT freezes B",
      path,
    )


def _require_same_base(path: pathlib.Path, init: Any) -> None:
  """A and B must belong to the weights of the base as it is published."""
  if init in _DRAWS:
    return
  way = _MERGE
  if isinstance(init, str) and _OF_ANOTHER_BASE.match(init):
    way = (
      "convert it to plain LoRA with PEFT (save_pretrained(folder, "
      "path_initial_model_for_weight_conversion=the adapter before training)), or "
      + _MERGE
    )
  raise ValueError(
    f"{path}: init_lora_weights is {init!r}: the base's weights were changed before "
    f"training, so the adapter does not belong to the published ones; {way}"
  )


def rank_alpha(peft: Mapping[str, Any], name: str) -> tuple[int, float]:
  """r and alpha of one module.

  Args:
    peft: the config.
    name: of the module, as PEFT's tensors spell it.

  Raises:
    ValueError: a value that is missing or no number in range.
  """
  rank = _by_pattern(peft, "rank_pattern", "r", name, hf_config.integer)
  alpha = _by_pattern(peft, "alpha_pattern", "lora_alpha", name, hf_config.number)
  checks.number(f"the rank of {name}", rank, checks.COUNT, whole=True)
  return rank, alpha


def _by_pattern(
  peft: Mapping[str, Any], patterns: str, field: str, name: str, read: Any
) -> Any:
  """PEFT takes the first pattern that the end of a module's name matches."""
  values = peft.get(patterns) or {}
  for pattern in values:
    if re.match(rf"(.*\.)?({pattern})$", name):
      return read(values, pattern)
  return read(peft, field)


def require_targeted(peft: Mapping[str, Any], name: str) -> None:
  """PEFT drops the tensors of modules that its config does not name; so they are
  a mistake of whoever made the folder, in one place or the other.

  Raises:
    ValueError: names the module.
  """
  targets, indices = peft.get("target_modules"), peft.get("layers_to_transform")
  chosen = targets is None or targets == "all-linear" or _named(targets, name)
  by_end = isinstance(targets, list) and name not in targets
  if chosen and by_end and indices not in (None, []):
    layers = peft.get("layers_pattern") or [r"[^.]*"]
    layers = [layers] if isinstance(layers, str) else layers
    matches = (re.match(rf"(?:^|.*?\.){x}\.(\d+)\.", name) for x in layers)
    layer = next((int(m.group(1)) for m in matches if m), None)
    chosen = layer in (indices if isinstance(indices, list) else [indices])
  if not chosen or _named(peft.get("exclude_modules") or [], name):
    raise ValueError(
      f"the file holds an adapter of {name!r}, which target_modules, exclude_modules "
      "or layers_to_transform of adapter_config.json leave out, so that PEFT ignores "
      "it: correct the config, or take the tensors out"
    )


def _named(targets: str | list[str], name: str) -> bool:
  """Whether PEFT takes a module for one of those named: by its end, or by a regular
  expression for all of it."""
  if isinstance(targets, str):
    return re.fullmatch(targets, name) is not None
  return any(name == x or name.endswith(f".{x}") for x in targets)
