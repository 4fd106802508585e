"""Modules that are trained whole, in PEFT's folders: the checkpoint's own names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from flax import nnx

from tunix.models import whole_modules
from tunix.models.families import Family
from tunix.models.tensor_files import NewTensor, StoredTensor
from tunix.models.transformer import params
from tunix.models.transformer.model import Transformer
from tunix.utils import mesh as mesh_lib, tree

# PEFT's model is the base in two wrappers.
PREFIX = "base_model.model."


def names(model: Transformer, family: Family, whole: Iterable[str]) -> list[str]:
  """PEFT's modules_to_save: full names, because PEFT goes by how a name ends, and
  q_norm ends as norm does.

  Args:
    model: adapted.
    family: its kind.
    whole: paths of the parameters that are trained whole.
  """
  places = (params.place(family.names, path, model.config) for path in whole)
  return sorted({owner(key) for place in places for key in place.keys})


def owner(key: str) -> str:
  """The module of a tensor of the checkpoint."""
  return key.rpartition(".")[0]


def tensors(
  model: Transformer, family: Family, whole: Mapping[str, Any]
) -> Iterator[NewTensor]:
  """What is written of the parameters that are trained whole, given by path."""
  for path, variable in whole.items():
    place = params.place(family.names, path, model.config)
    value = mesh_lib.to_host(variable.get_value())
    value = value.reshape(-1, *value.shape[len(place.lead) :])
    for key, one in zip(place.keys, value):
      one = np.ascontiguousarray(one.T if place.transpose else one)
      yield NewTensor(PREFIX + key, one.dtype, one.shape, lambda one=one: one)


def read(
  model: Transformer,
  family: Family,
  held: dict[str, StoredTensor],
  peft: Mapping[str, Any],
) -> dict[str, np.ndarray]:
  """The parameters of the modules in modules_to_save, by path; their tensors are taken
  out of `held`. Names of modules that the model lacks mean nothing, as in PEFT, which
  writes both of the names that a head of scores can have.

  Raises:
    ValueError: a tensor is missing or of another shape, a module cannot be trained
      whole, or some layers of a stack are named and not all.
  """
  asked = peft.get("modules_to_save") or []
  of_model = tree.flatten(nnx.state(model, nnx.Param)).items()
  out = {}
  for path, value in of_model:
    if owner(path).endswith(".kernel"):  # codes or scales of a quantised one
      continue
    place = params.place(family.names, path, model.config)
    # So PEFT compares: "norm" stands for q_norm as well.
    chosen = [owner(key).endswith(tuple(asked)) for key in place.keys]
    if not any(chosen):
      continue
    if not all(chosen):
      raise ValueError(
        f"modules_to_save {asked} names some layers of {owner(path)} and not all: "
        "load the adapter into model.unstack()"
      )
    shape = place.tensor_shape(value.shape)
    parts = [read_tensor(held, PREFIX + key, shape) for key in place.keys]
    parts = [part.T if place.transpose else part for part in parts]
    out[path] = np.stack(parts).reshape(value.shape)
    for key in place.keys:
      del held[PREFIX + key]
  whole_modules.choose(model, {owner(path) for path in out})
  return out


def read_tensor(
  tensors: Mapping[str, StoredTensor], key: str, shape: tuple[int, ...]
) -> np.ndarray:
  """A tensor of an adapter's file.

  Raises:
    ValueError: it is missing or of another shape.
  """
  tensor = tensors.get(key)
  if tensor is None or tensor.shape != shape:
    state = "missing" if tensor is None else f"of shape {tensor.shape}"
    raise ValueError(
      f"adapter tensor {key!r} is {state}, expected shape {shape}: the adapter belongs "
      "to another model, or the folder is damaged"
    )
  # A copy: a map holds its file open, and an adapter of experts has thousands.
  return np.array(tensor.map())
