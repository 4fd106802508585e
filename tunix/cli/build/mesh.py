"""The axes of the key `mesh`: their checks, and the mesh over all devices."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from tunix.sft import sharding_utils
from tunix.utils import checks, mesh as mesh_lib

# Mesh axes that split a batch, and all axes of the decoder's sharding rules.
DATA_AXES = ("dp", "fsdp", "ep")
MESH_AXES = (*DATA_AXES, "tp", "cp")


def data_axes(mesh: dict[str, int]) -> tuple[str, ...]:
  """Returns the axes of a mesh that split a batch."""
  return tuple(axis for axis in DATA_AXES if axis in mesh)


def check(mesh: dict[str, int], batch_rows: dict[str, int]) -> None:
  """Refuses unknown axes, and batches that the data axes do not divide.

  A size of -1 (all devices that the other axes leave) counts as 1 here.

  Args:
    mesh: sizes by axis.
    batch_rows: rows of batches by key, see `TrainingSettings.batch_rows`.

  Raises:
    TypeError: the mesh is no mapping, or a size is no number.
    ValueError: names the axis or the batch size, and a value that fits.
  """
  if not isinstance(mesh, Mapping):
    raise TypeError(
      f"mesh is {mesh!r}; expected sizes by axis. Give a mapping such as "
      "{'fsdp': 4, 'tp': 2}."
    )
  for axis, size in mesh.items():
    if axis not in MESH_AXES:
      raise ValueError(
        f"mesh.{axis} is no axis of the decoder's sharding: use {', '.join(MESH_AXES)}"
      )
    checks.number(f"mesh.{axis}", size, whole=True)
    if size < 1 and size != -1:
      raise ValueError(
        f"mesh.{axis} is {size}; expected at least 1, or -1 for all remaining devices"
      )
  axes = data_axes(mesh)
  shards = math.prod(max(1, mesh[axis]) for axis in axes)
  for key, rows in batch_rows.items():
    if rows % shards:
      sizes = " x ".join(f"{axis} {mesh[axis]}" for axis in axes)
      raise ValueError(
        f"{key} is {rows} and does not divide over the {shards} shards of the "
        f"mesh ({sizes}): make it a multiple of {shards}"
      )


def check_length(mesh: dict[str, int], keys: str, tokens: int) -> None:
  """Refuses rows whose tokens the axis cp does not divide.

  Without this check each device of the axis would hold and compute all tokens.

  Args:
    mesh: sizes by axis.
    keys: keys that add up to the length of a row.
    tokens: length of a row.

  Raises:
    ValueError: names the keys, and the nearest lengths that fit.
  """
  shards = mesh.get("cp", 1)
  if shards > 1 and tokens % shards:
    below = tokens // shards * shards
    raise ValueError(
      f"{keys} is {tokens}, which the {shards} shards of mesh.cp do not divide: make "
      f"it {f'{below} or ' if below else ''}{below + shards}"
    )


def process_part(mesh: dict[str, int]) -> tuple[int, int]:
  """Returns (number, count) of the part of each batch that this process draws."""
  # No mesh in a single process, which may show the data of a run on more devices.
  several = mesh and jax.process_count() > 1
  device_mesh = mesh_lib.create_mesh(mesh) if several else None
  return sharding_utils.process_part(device_mesh, data_axes(mesh))


def build(
  mesh: dict[str, int], batch_rows: dict[str, int], length: tuple[str, int]
) -> Mesh | None:
  """Builds the mesh over all devices; None for an empty mesh.

  Args:
    mesh: sizes by axis.
    batch_rows: rows of batches by key, as for `check`.
    length: keys and tokens of a row, as for `check_length`.

  Raises:
    ValueError: the sizes do not fit the devices, or batches or rows do not divide over
      the mesh.
  """
  if not mesh:
    return None
  device_mesh = mesh_lib.create_mesh(mesh)
  # With -1 resolved, the batches are checked again.
  sizes = {axis: int(size) for axis, size in device_mesh.shape.items()}
  check(sizes, batch_rows)
  check_length(sizes, *length)
  return device_mesh
