"""Adapters of whole parameters in PEFT's folders: fused experts.

PEFT adapts a parameter [E, in, out] (its `target_parameters`) by one pair of matrices
for all experts, A [E r, in] and B [out, r E]. The module that holds the parameter is
wrapped once for each of them, the first one inside: its tensors have `base_layer` in
their names if another parameter of the module has an adapter too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tunix.models.adapters import config as adapter_config, lora_modules, whole_files
from tunix.models.adapters.lora_modules import Adapter
from tunix.models.adapters.stacks import TensorAdapter
from tunix.models.families import Family
from tunix.models.files.stored_tensor import StoredTensor
from tunix.models.transformer import params
from tunix.models.transformer.dense.layers import Linear
from tunix.models.transformer.hf import values as hf_values
from tunix.models.transformer.model import Transformer
from tunix.utils import mesh as mesh_lib

_INNER = ".base_layer"


def names(model: Transformer, family: Family) -> dict[str, list[str]]:
  """Returns the names of parameters of experts, by path of our module.

  A stacked module has several names, in the order of its stack. Modules are in the
  order of the family's table, which is that of the parameters in `transformers`: the
  order in which PEFT wraps them.
  """
  order = {key: place for place, key in enumerate(family.names)}

  def place_of(path: str) -> int:
    plain = params.without_structure(re.sub(r"\.\d+", "", path), model.config)
    return order.get(f"{plain}.kernel", 0)

  paths = sorted(lora_modules.adaptable(model), key=place_of)
  places = {x: params.place(family.names, f"{x}.kernel", model.config) for x in paths}
  return {
    path: list(place.keys)
    for path, place in places.items()
    if not place.keys[0].endswith(".weight")
  }


def holder(name: str) -> str:
  """Returns the name of the module that holds a parameter."""
  return name.rpartition(".")[0]


def _check(linear: Linear, name: str) -> None:
  """Refuses an adapter that PEFT cannot compute.

  Raises:
    ValueError: the adapter has dropout or magnitudes.
  """
  if linear.lora_dropout or linear.lora_magnitude is not None:
    kind = "use_dora" if linear.lora_magnitude is not None else "dropout"
    raise ValueError(
      f"the adapter of {name} has {kind}; PEFT has no {kind} for parameters of "
      "experts. Save the merged model, or train without it"
    )


def joined(
  linear: Linear, names: Sequence[str], adapted: Sequence[str]
) -> Iterator[TensorAdapter]:
  """Yields the adapters of a module, one for each parameter of the checkpoint.

  Args:
    linear: a module with an adapter and kernels [*stack, E, in, out].
    names: names of its parameters, in the order of the stack.
    adapted: names of all parameters with an adapter, in the order of the checkpoint.
  """
  a, b = (mesh_lib.to_host(x) for x in lora_modules.pair_of(linear))
  experts, rows, rank = a.shape[-3:]
  a, b = a.reshape(-1, experts, rows, rank), b.reshape(-1, *b.shape[-3:])
  for number, name in enumerate(names):
    _check(linear, name)
    yield TensorAdapter(
      name,
      a[number].transpose(1, 0, 2).reshape(rows, experts * rank),
      b[number].transpose(1, 0, 2).reshape(rank * experts, -1),
      None,
      linear.lora_scale,
      experts,
      stored_name(name, adapted),
    )


def stored_name(name: str, adapted: Sequence[str]) -> str:
  """Returns the name of a parameter's wrapper in PEFT's file.

  Args:
    name: name of the parameter.
    adapted: see `joined`.
  """
  module = holder(name)
  after = [x for x in adapted if holder(x) == module]
  return module + _INNER * (len(after) - 1 - after.index(name))


def targeted(names: Sequence[str], peft: Mapping[str, Any]) -> list[str]:
  """Returns the parameters that `target_parameters` selects, in their order."""
  targets = peft.get("target_parameters") or []
  return [
    name for name in names if any(name == x or name.endswith(f".{x}") for x in targets)
  ]


def read(
  names: Sequence[str],
  targeted: Sequence[str],
  shape: tuple[int, ...],
  tensors: Mapping[str, StoredTensor],
  peft: Mapping[str, Any],
  used: set[str],
) -> Adapter | None:
  """Reads the adapter of one of our modules; None if it has none.

  Args:
    names: names of its parameters, in the order of the stack.
    targeted: names of all parameters with an adapter.
    shape: shape of the kernel, [*stack, E, in, out].
    tensors: the tensors of PEFT's file.
    peft: the contents of `adapter_config.json`.
    used: gets the names of the tensors that are read.

  Raises:
    ValueError: a tensor is missing or of another shape, or a rank is no number.
  """
  experts, rows, columns = shape[-3:]
  parts: list[TensorAdapter | None] = []
  for name in names:
    if name not in targeted:
      parts.append(None)
      continue
    module = whole_files.PREFIX + stored_name(name, targeted)
    keys = [f"{module}.lora_{side}.weight" for side in "AB"]
    rank, alpha = adapter_config.rank_alpha(peft, name)
    a = whole_files.read_tensor(tensors, keys[0], (experts * rank, rows))
    b = whole_files.read_tensor(tensors, keys[1], (columns, rank * experts))
    used.update(keys)
    scale = alpha / (math.sqrt(rank) if hf_values.flag(peft, "use_rslora") else rank)
    parts.append(TensorAdapter(name, a.T, b.T, None, scale, experts))
  if all(part is None for part in parts):
    return None
  return _stacked(parts, shape, hf_values.flag(peft, "use_rslora"))


def _stacked(
  parts: Sequence[TensorAdapter | None], shape: tuple[int, ...], rslora: bool
) -> Adapter:
  """Returns the adapter of a stack of parameters, padded to the largest rank.

  Args:
    parts: one adapter per parameter, with the arrays of `joined`; None for a parameter
      without one.
    shape: shape of the kernel, [*stack, E, in, out].
    rslora: see `Adapter`.
  """
  *stack, experts, rows, columns = shape
  present = [part for part in parts if part is not None]
  most, scale = max(part.rank for part in present), present[0].scale
  a = np.zeros((len(parts), experts, rows, most), present[0].a.dtype)
  b = np.zeros((len(parts), experts, most, columns), present[0].b.dtype)
  for i, part in enumerate(parts):
    if part is None:
      continue
    rank, ratio = part.rank, part.scale / scale
    a[i, :, :, :rank] = part.a.reshape(rows, experts, rank).transpose(1, 0, 2)
    back = part.b.reshape(rank, experts, columns).transpose(1, 0, 2)
    b[i, :, :rank] = back if ratio == 1 else back * ratio
  return Adapter(
    a=a.reshape(*stack, experts, rows, most),
    b=b.reshape(*stack, experts, most, columns),
    scale=scale,
    rslora=rslora,
  )
