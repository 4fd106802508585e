"""The axes of the key `mesh`: which there are, and the mesh over all devices."""

from __future__ import annotations

import math

import jax
from jax.sharding import Mesh

from tunix.sft import sharding_utils
from tunix.utils import mesh as mesh_lib

# Mesh axes that split a batch, and all axes that the decoder's sharding rules know.
DATA_AXES = ("dp", "fsdp", "ep")
MESH_AXES = (*DATA_AXES, "tp", "cp")


def data_axes(mesh: dict[str, int]) -> tuple[str, ...]:
  """The axes of a mesh that split a batch."""
  return tuple(axis for axis in DATA_AXES if axis in mesh)


def check(mesh: dict[str, int], batch_rows: dict[str, int]) -> None:
  """Refuses axes that mean nothing, and batches that the data axes do not divide.

  Args:
    mesh: sizes by axis.
    batch_rows: rows of batches by key, see `TrainingSettings.batch_rows`.

  A size of -1 (what the other axes leave) counts as 1 until devices are known.

  Raises:
    ValueError: which axis or batch size, and what would do.
  """
  for axis, size in mesh.items():
    if axis not in MESH_AXES:
      raise ValueError(
        f"mesh.{axis} is no axis that splits anything: use {', '.join(MESH_AXES)}"
      )
    if size < 1 and size != -1:
      raise ValueError(
        f"mesh.{axis} is {size}: it must be at least 1, or -1 for what is left"
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
  """Refuses rows whose tokens the axis cp does not divide: each of its devices would
  compute, and hold, all of them.

  Args:
    mesh: sizes by axis.
    keys: what makes up the length of a row.
    tokens: that length.

  Raises:
    ValueError: the keys, and the lengths next to theirs that would do.
  """
  shards = mesh.get("cp", 1)
  if shards > 1 and tokens % shards:
    below = tokens // shards * shards
    raise ValueError(
      f"{keys} is {tokens}, which the {shards} shards of mesh.cp do not divide: make "
      f"it {f'{below} or ' if below else ''}{below + shards}"
    )


def process_part(mesh: dict[str, int]) -> tuple[int, int]:
  """(number, count) of the part of each batch that this process draws."""
  # One process may look at the data of a run on more devices than it has.
  several = mesh and jax.process_count() > 1
  made = mesh_lib.create_mesh(mesh) if several else None
  return sharding_utils.process_part(made, data_axes(mesh))


def build(
  mesh: dict[str, int], batch_rows: dict[str, int], length: tuple[str, int]
) -> Mesh | None:
  """The mesh over all devices; None when none is asked for.

  Args:
    mesh, batch_rows: see `check`.
    length: the keys, and the tokens, of `check_length`.

  Raises:
    ValueError: its sizes do not fit the devices, or batches or rows do not divide over
      it.
  """
  if not mesh:
    return None
  made = mesh_lib.create_mesh(mesh)
  # What -1 stands for is known only now.
  sizes = {axis: int(size) for axis, size in made.shape.items()}
  check(sizes, batch_rows)
  check_length(sizes, *length)
  return made
