"""The axes of `mesh`, and which of them split batches."""

from __future__ import annotations

import math

# Mesh axes that split a batch, and all axes that the decoder's sharding rules know.
DATA_AXES = ("dp", "fsdp")
MESH_AXES = (*DATA_AXES, "tp", "ep")


def data_axes(mesh: dict[str, int]) -> tuple[str, ...]:
  """The axes of a mesh that split a batch."""
  return tuple(axis for axis in DATA_AXES if axis in mesh)


def check_mesh(mesh: dict[str, int], batch_rows: dict[str, int]) -> None:
  """Refuses axes that mean nothing, and batches that the data axes do not divide.

  Args:
    mesh: sizes by axis.
    batch_rows: see `Config.batch_rows`.

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
