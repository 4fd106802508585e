"""Reader and writer of PEFT folders: `adapter_config.json` and one safetensors file.

PEFT has one adapter per tensor of the checkpoint; stacks.py converts between
these and the adapters of stacked modules. Modules that are trained whole are stored
beside the adapters, under their names in the checkpoint.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import logging
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from tunix.models import families
from tunix.models.adapters import (
  config as adapter_config,
  lora_modules,
  parameters as adapter_parameters,
  token_rows,
  whole_files,
  whole_modules,
)
from tunix.models.adapters.lora_modules import Adapter
from tunix.models.adapters.stacks import TensorAdapter, stacked, unstacked
from tunix.models.adapters.whole_files import PREFIX, read_tensor
from tunix.models.families import Family
from tunix.models.files import sums as file_sums, tensor_files
from tunix.models.files.tensor_files import NewTensor, StoredTensor
from tunix.models.transformer import params
from tunix.models.transformer.dense.layers import Linear
from tunix.models.transformer.hf import values as hf_values
from tunix.models.transformer.model import Transformer

_log = logging.getLogger(__name__)

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_MAGNITUDE = "lora_magnitude_vector"
_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")


def _names(model: Transformer, family: Family, path: str) -> list[str]:
  """Returns Hugging Face's names of the modules in one of our modules.

  A stacked module has several names, in the order of its stack.
  """
  place = params.place(family.names, f"{path}.kernel", model.config)
  return [key.removesuffix(".weight") for key in place.keys]


# Saving.


def save_adapter(
  model: Transformer,
  folder: str | os.PathLike[str],
  *,
  base: str | None = None,
  revision: str | None = None,
  family: Family | None = None,
) -> None:
  """Writes the adapters, and modules that are trained whole, as a PEFT folder.

  If only one or two of the experts' three projections have adapters, a warning is
  logged: PEFT 0.21 reads such a folder wrongly (docs/limits.md), this package reads it
  correctly.

  Args:
    model: a model with adapters. It is unchanged.
    folder: the folder to write, see `tensor_files.staged_folder`.
    base: name or folder of the base model, recorded in the file.
    revision: the base model's revision on the hub, recorded in the file.
    family: the kind of model; None selects it by the class of the configuration.

  Raises:
    ValueError: the model has no adapters. Or its adapters differ in a setting for which
      PEFT has one value: dropout, or the use of DoRA.
    OSError: the disk is full or not writable.
  """
  lora_modules.require_adapters(model)
  family = family or families.of_config(model.config)
  adapters = lora_modules.adapted(model)
  wholes = adapter_parameters.names(model, family)
  fused = [name for path in wholes if path in adapters for name in wholes[path]]
  parts = {
    path: list(
      adapter_parameters.joined(linear, wholes[path], fused)
      if path in wholes
      else unstacked(linear, _names(model, family, path))
    )
    for path, linear in adapters.items()
  }
  named = {"base_model_name_or_path": base}
  named |= {} if revision is None else {"revision": revision}
  config = _spelled(_peft_config(model, family, parts, fused, named), family)
  _warn_of_experts(adapters)
  tensors = [x for group in parts.values() for part in group for x in new_tensors(part)]
  tensors += whole_files.tensors(model, family, whole_modules.of(model))
  tensors += token_rows.tensors(model, family)
  tensors = [
    dataclasses.replace(x, name=PREFIX + family.module_key(x.name.removeprefix(PREFIX)))
    for x in tensors
  ]
  together = tensor_files.is_spread(model)
  mine = not together or jax.process_index() == 0
  with tensor_files.staged_folder(pathlib.Path(folder), together=together) as staging:
    tensor_files.write_file(staging / WEIGHTS_FILE, tensors, mine=mine)
    if mine:
      (staging / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


_NAMED = ("target_modules", "target_parameters", "modules_to_save")
_NAMED += ("rank_pattern", "alpha_pattern")


def _spelled(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
  """Returns `adapter_config.json` with names of modules, see `Family.module_key`."""

  def each(value: Any) -> Any:
    if isinstance(value, dict):
      return {family.module_key(name): x for name, x in value.items()}
    return sorted(map(family.module_key, value)) if isinstance(value, list) else value

  return {k: each(v) if k in _NAMED else v for k, v in config.items()}


def _peft_config(
  model: Transformer,
  family: Family,
  parts: Mapping[str, list[TensorAdapter]],
  fused: list[str],
  named: Mapping[str, Any],
) -> dict[str, Any]:
  """Returns the contents of `adapter_config.json`.

  Args:
    model: a model with adapters.
    family: the kind of model.
    parts: the adapters of single tensors, by path of the module.
    fused: the checkpoint's names of parameters that hold several experts.
    named: the fields that name the base model.
  """
  adapters = lora_modules.adapted(model)
  rslora = all(x.lora_rslora for x in adapters.values())
  whole = whole_modules.of(model)
  wholes = adapter_parameters.names(model, family)
  every = [part for group in parts.values() for part in group]
  single = [x for path, group in parts.items() if path not in wholes for x in group]
  parameters = sorted([*fused, *dense_maps(single)])
  return {
    "peft_type": "LORA",
    "task_type": "SEQ_CLS" if "score.kernel" in whole else "CAUSAL_LM",
    **named,
    **sizes_of(every, rslora),
    "target_modules": _peft_targets(
      model, family, {path: parts[path] for path in parts if path not in wholes}
    ),
    **({"target_parameters": parameters} if parameters else {}),
    "modules_to_save": whole_files.names(model, family, whole) or None,
    **token_rows.peft_fields(model, family),
    "lora_dropout": _common(adapters, "dropout", lambda x: x.lora_dropout),
    "use_rslora": rslora,
    "use_dora": _common(adapters, "use_dora", lambda x: x.lora_magnitude is not None),
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
  }


def dense_maps(parts: list[TensorAdapter]) -> list[str]:
  """Returns weights of dense layers and shared experts beside adapted experts.

  With transformers 5, PEFT 0.21 takes gate_proj, up_proj and down_proj for names of
  fused experts and removes them from the modules. Parameters it keeps.
  """
  names = [part.name for part in parts]
  if not any(".experts." in name for name in names):
    return []
  dense = (name for name in names if ".experts." not in name)
  return [f"{name}.weight" for name in dense if name.rpartition(".")[2] in _OF_EXPERTS]


def _common(adapters: dict[str, Linear], what: str, of: Callable[[Linear], Any]) -> Any:
  values = {of(linear) for linear in adapters.values()}
  if len(values) > 1:
    raise ValueError(
      f"adapters whose {what} is {sorted(values)} cannot be saved in one folder: give "
      "all of them one value"
    )
  return values.pop()


def new_tensors(part: TensorAdapter) -> list[NewTensor]:
  name = PREFIX + (part.stored or part.name)
  out = [
    NewTensor(
      f"{name}.lora_{side}.weight",
      value.dtype,
      value.shape[::-1],
      functools.partial(np.transpose, value),
    )
    for side, value in (("A", part.a), ("B", part.b))
  ]
  if (m := part.magnitude) is not None:
    out.append(NewTensor(f"{name}.{_MAGNITUDE}", m.dtype, m.shape, lambda: m))
  return out


def sizes_of(parts: list[TensorAdapter], rslora: bool) -> dict[str, Any]:
  """Returns the fields r and lora_alpha, the most common values, and the patterns.

  The patterns hold the values of the other modules.
  """
  if not parts:
    raise ValueError("every adapter is zero throughout: there is nothing to save")
  ranks = {part.name: part.rank for part in parts}
  alphas = {
    part.name: part.scale
    * (math.sqrt(ranks[part.name]) if rslora else ranks[part.name])
    for part in parts
  }
  out: dict[str, Any] = {}
  for field, pattern, values in (
    ("r", "rank_pattern", ranks),
    ("lora_alpha", "alpha_pattern", alphas),
  ):
    common = collections.Counter(values.values()).most_common(1)[0][0]
    out[field] = common
    out[pattern] = _patterns(values, common)
  return out


def _patterns(values: dict[str, Any], common: object) -> dict[str, Any]:
  """Returns the values that differ from the common one, by name.

  The name is a module's last part if all layers share the value, else its full name.
  """
  by_name: dict[str, set[Any]] = {}
  for name, value in values.items():
    by_name.setdefault(name.rpartition(".")[2], set()).add(value)
  out = {}
  for name, value in values.items():
    short = name.rpartition(".")[2]
    if len(by_name[short]) == 1 and value != common:
      out[short] = value
    elif value != common:
      out[name] = value
  return out


def _peft_targets(
  model: Transformer, family: Family, parts: Mapping[str, list[TensorAdapter]]
) -> list[str]:
  """Returns the field target_modules.

  It holds last parts of names, or full names if only some layers have an adapter. So
  does a model with a vision tower, in which PEFT finds modules that are no linear maps
  by last parts (Gemma 4's).
  """
  full = {part.name for group in parts.values() for part in group}
  short = {name.rpartition(".")[2] for name in full}
  if hasattr(model, lora_modules.IMAGE_MODULES[0]):
    return sorted(full)
  for path in lora_modules.adaptable(model):
    same = [x for x in _names(model, family, path) if x.rpartition(".")[2] in short]
    if not full.issuperset(same):
      return sorted(full)
  return sorted(short)


def _warn_of_experts(adapters: Mapping[str, Linear]) -> None:
  """Logs a warning about adapters of experts that PEFT cannot read.

  transformers 5 fuses the gate and up projections of experts, and PEFT finds the fused
  pair only if the down projection has an adapter too.
  """
  every = set(_OF_EXPERTS)
  names = {path.rsplit(".", 1)[1] for path in adapters if ".experts." in path}
  if names & {"gate_proj", "up_proj"} and names != every:
    _log.warning(
      "adapters on the experts' %s and not on %s: PEFT 0.21 with transformers 5 "
      "refuses them or reads zeros; adapt all three, or give it the merged model",
      " and ".join(sorted(names)),
      " and ".join(sorted(every - names)),
    )


# Loading.


def load_adapter(
  model: Transformer,
  folder: str | os.PathLike[str],
  *,
  seed: int = 0,
  family: Family | None = None,
) -> Transformer:
  """Returns a model with the adapters of a PEFT folder.

  It shares the weights of `model`. The folder may adapt only some of the layers, may
  have ranks and alphas by pattern, and may hold modules that were trained whole, which
  replace the model's.

  Args:
    model: a model without adapters. It is unchanged.
    folder: a folder that `save_adapter` or PEFT wrote.
    seed: seed of the dropout masks, used if training continues.
    family: the kind of model; None selects it by the class of the configuration.

  Raises:
    FileNotFoundError: the folder or one of its two files does not exist.
    ValueError: PEFT's settings cannot be reproduced, see `adapter_config`. Or a tensor
      is missing, has another shape, or names a module that cannot be adapted. Or the
      model has adapters already.
  """
  lora_modules.require_bare(model)
  weights = pathlib.Path(folder) / WEIGHTS_FILE
  if weights.is_file():
    model = token_rows.with_tables(model, tensor_files.read_header(weights))
  adapters, whole = read_adapter(model, folder, family=family)
  rows = {path: whole.pop(path) for path in list(whole) if path in token_rows.TABLES}
  ids = token_rows.ids_of(tensor_files.read_json(pathlib.Path(folder) / CONFIG_FILE))
  # The base model may lack the tokens that the adapter was trained with.
  model = token_rows.with_room(model, ids)
  key = jax.random.fold_in(jax.random.key(seed), 1)
  out = lora_modules.attach(model, lora_modules.placed(model, adapters), key)
  whole_modules.mark(out, {whole_files.module_of(path) for path in whole})
  token_rows.load(out, ids, rows)
  for path, variable in whole_modules.of(out).items():
    variable.set_value(jax.device_put(whole[path], variable.get_value().sharding))
  return out


def read_adapter(
  model: Transformer,
  folder: str | os.PathLike[str],
  *,
  family: Family | None = None,
) -> tuple[dict[str, Adapter], dict[str, np.ndarray]]:
  """Reads a PEFT folder into host memory.

  Args:
    model: the model that the adapter belongs to. It is unchanged, has no adapters, and
      may be a model of shapes.
    folder, family: see `load_adapter`.

  Returns:
    The adapters by path of the module, and by path of the parameter the modules that
    were trained whole and the rows of `token_rows`.

  Raises:
    FileNotFoundError, ValueError: see `load_adapter`.
  """
  path = pathlib.Path(folder)
  if not (path / CONFIG_FILE).is_file() or not (path / WEIGHTS_FILE).is_file():
    raise FileNotFoundError(
      f"{path} lacks {CONFIG_FILE} or {WEIGHTS_FILE}: give a folder that save_adapter "
      "or PEFT wrote"
    )
  file_sums.check(path)
  peft = tensor_files.read_json(path / CONFIG_FILE)
  family = family or families.of_config(model.config)
  adapter_config.require_readable(path / CONFIG_FILE, peft)
  # Parameters that `target_parameters` can select are fused experts, and the weights of
  # modules, see `dense_maps`.
  modules = lora_modules.adaptable(model)
  weights = {f"{name}.weight" for x in modules for name in _names(model, family, x)}
  has_fused = bool(adapter_parameters.names(model, family))
  is_known = has_fused or weights.issuperset(peft.get("target_parameters") or ())
  known = {"target_parameters"} if is_known else set()
  adapter_config.require_exact(
    path / CONFIG_FILE, {name: peft[name] for name in peft.keys() - known}
  )
  # The patterns of the configuration match names as PEFT spells them in the file.
  tensors, spelled = {}, {}
  for key, tensor in tensor_files.read_header(path / WEIGHTS_FILE).items():
    raw = key.removeprefix(PREFIX)
    tensors[PREFIX + family.canonical_key(raw)] = tensor
    spelled[module_name(family.canonical_key(raw))] = module_name(raw)
  try:
    whole = whole_files.read(model, family, tensors, peft)
    whole |= token_rows.read(model, family, tensors, peft)
    return _read(model, family, tensors, spelled, peft), whole
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error


def module_name(key: str) -> str:
  """Returns the name of the module of an adapter's tensor."""
  return re.sub(rf"\.(lora_[AB]\.weight|{_MAGNITUDE})$", "", key)


def _read(
  model: Transformer,
  family: Family,
  tensors: Mapping[str, StoredTensor],
  spelled: Mapping[str, str],
  peft: dict[str, Any],
) -> dict[str, Adapter]:
  """Returns the adapters by path of the module.

  Args:
    model: the model that the adapter is loaded into.
    family: the kind of model.
    tensors: the tensors of the file, under the names of the family's table.
    spelled: maps the table's name of a module to its name in the file.
    peft: the contents of `adapter_config.json`.
  """
  out: dict[str, Adapter] = {}
  used: set[str] = set()
  modules = lora_modules.adaptable(model, images=True)
  wholes = adapter_parameters.names(model, family)
  fused = [name for names in wholes.values() for name in names]
  fused = adapter_parameters.targeted(fused, peft)
  for path, linear in modules.items():
    if path in wholes:
      shape = linear.kernel.shape
      whole = adapter_parameters.read(wholes[path], fused, shape, tensors, peft, used)
      out |= {} if whole is None else {path: whole}
      continue
    stack = []
    for name in _names(model, family, path):
      keys = factor_keys(name, hf_values.flag(peft, "use_dora"))
      if tensors.keys().isdisjoint(keys):
        stack.append(None)
        continue
      adapter_config.require_targeted(peft, spelled[name])
      sizes = adapter_config.rank_alpha(peft, spelled[name])
      shape = linear.kernel.shape[-2:]
      stack.append(read_tensor_adapter(name, keys, shape, sizes, tensors, peft))
      used.update(keys)
    if any(part is not None for part in stack):
      out[path] = stacked(stack, linear.kernel.shape, peft)
  unused = sorted(tensors.keys() - used)
  if unused or not out:
    if f"{PREFIX}score.weight" in unused:
      raise ValueError(
        "the adapter has a head of scores and the model has none: load the model with "
        f"num_scores={tensors[f'{PREFIX}score.weight'].shape[0]}"
      )
    raise ValueError(
      f"adapter tensors {unused[:3]} name no module that can be adapted; modules are "
      f"{', '.join(modules)}"
    )
  return out


def factor_keys(name: str, use_dora: bool) -> list[str]:
  fields = ["lora_A.weight", "lora_B.weight"] + [_MAGNITUDE] * use_dora
  return [f"{PREFIX}{name}.{field}" for field in fields]


def read_tensor_adapter(
  name: str,
  keys: list[str],
  shape: tuple[int, ...],
  sizes: tuple[int, float],
  tensors: Mapping[str, StoredTensor],
  peft: dict[str, Any],
) -> TensorAdapter:
  (rank, alpha), (rows, columns) = sizes, shape
  a, b, *magnitude = (
    read_tensor(tensors, key, expected)
    for key, expected in zip(keys, ((rank, rows), (columns, rank), (columns,)))
  )
  scale = alpha / (math.sqrt(rank) if hf_values.flag(peft, "use_rslora") else rank)
  return TensorAdapter(name, a.T, b.T, magnitude[0] if magnitude else None, scale)
