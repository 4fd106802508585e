"""Tensors of modules that are trained whole, in PEFT's folders.

PEFT stores them under the names of the base checkpoint, beside the adapters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from flax import nnx

from tunix.models.adapters import whole_modules
from tunix.models.families import Family
from tunix.models.files.tensor_files import NewTensor, StoredTensor
from tunix.models.transformer import params
from tunix.models.transformer.model import Transformer
from tunix.utils import mesh as mesh_lib, tree

# PEFT's model holds the base model inside two wrappers.
PREFIX = "base_model.model."


def names(model: Transformer, family: Family, whole: Iterable[str]) -> list[str]:
  """Returns the value of PEFT's `modules_to_save`.

  These are full names of modules. PEFT selects modules by the end of their names, and
  the short name "norm" would select `q_norm` as well.

  Args:
    model: the adapted model.
    family: the kind of model.
    whole: paths of the parameters that are trained whole.
  """
  places = (params.place(family.names, path, model.config) for path in whole)
  return sorted({module_of(key) for place in places for key in place.keys})


def module_of(key: str) -> str:
  """Returns the module of a tensor or parameter: its name without the last part."""
  return key.rpartition(".")[0]


def tensors(
  model: Transformer, family: Family, whole: Mapping[str, Any]
) -> Iterator[NewTensor]:
  """Yields the tensors to write for the parameters that are trained whole.

  Args:
    model: the adapted model.
    family: the kind of model.
    whole: the variables of these parameters by path.
  """
  for path, variable in whole.items():
    place = params.place(family.names, path, model.config)
    parts = place.split(mesh_lib.to_host(variable.get_value()))
    for key, part in zip(place.keys, parts):

      def read(part=part):
        return np.ascontiguousarray(part)

      yield NewTensor(PREFIX + key, part.dtype, part.shape, read)


def read(
  model: Transformer,
  family: Family,
  stored: dict[str, StoredTensor],
  peft: Mapping[str, Any],
) -> dict[str, np.ndarray]:
  """Returns the parameters of the modules in `modules_to_save`, by path.

  Names of modules that the model lacks are ignored, as in PEFT, which writes both names
  that a score head can have.

  Args:
    model: the model that the adapter is loaded into.
    family: the kind of model.
    stored: the tensors of the adapter's file. The tensors of these modules are removed.
    peft: the contents of `adapter_config.json`.

  Raises:
    ValueError: a tensor is missing or of another shape, a module cannot be trained
      whole, or `modules_to_save` names some layers of a stack and not all.
  """
  modules = peft.get("modules_to_save") or []
  out = {}
  for path, value in tree.flatten(nnx.state(model, nnx.Param)).items():
    if module_of(path).endswith(".kernel"):  # codes or scales of a quantized kernel
      continue
    place = params.place(family.names, path, model.config)
    # PEFT compares the ends of the names: "norm" selects q_norm too.
    chosen = [module_of(key).endswith(tuple(modules)) for key in place.keys]
    if not any(chosen):
      continue
    if not all(chosen):
      raise ValueError(
        f"modules_to_save {modules} names some layers of {module_of(path)} and not "
        "all: load the adapter into model.unstack()"
      )
    keys = [PREFIX + key for key in place.keys]
    shape = place.tensor_shape(value.shape)
    parts = [read_tensor(stored, key, shape) for key in keys]
    out[path] = place.join(parts, value.shape)
    for key in keys:
      del stored[key]
  whole_modules.choose(model, {module_of(path) for path in out})
  return out


def read_tensor(
  tensors: Mapping[str, StoredTensor], key: str, shape: tuple[int, ...]
) -> np.ndarray:
  """Reads a tensor of an adapter's file into memory.

  Raises:
    ValueError: the tensor is missing or of another shape.
  """
  tensor = tensors.get(key)
  if tensor is None or tensor.shape != shape:
    state = "missing" if tensor is None else f"of shape {tensor.shape}"
    raise ValueError(
      f"adapter tensor {key!r} is {state}, expected shape {shape}: the adapter belongs "
      "to another model, or the folder is damaged"
    )
  # Copied, because a map keeps its file open, and an adapter of experts has thousands
  # of tensors.
  return np.array(tensor.map())
