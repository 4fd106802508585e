"""The axes of the key `mesh`: their checks, and the mesh over all devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

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


def data_shards(mesh: dict[str, int]) -> int:
  """Returns the number of shards of a batch; -1 is what the other axes leave."""
  sizes = [mesh[axis] for axis in data_axes(mesh)]
  if -1 not in sizes:
    return math.prod(sizes)
  return jax.device_count() // max(1, -math.prod(mesh.values())) * -math.prod(sizes)


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
  _check_axes("mesh", mesh)
  axes = data_axes(mesh)
  shards = math.prod(max(1, mesh[axis]) for axis in axes)
  for key, rows in batch_rows.items():
    if rows % shards:
      sizes = " x ".join(f"{axis} {mesh[axis]}" for axis in axes)
      raise ValueError(
        f"{key} is {rows} and does not divide over the {shards} shards of the "
        f"mesh ({sizes}): make it a multiple of {shards}"
      )


def check_rollout(mesh: dict[str, int]) -> None:
  """Refuses unknown axes, and sizes that are not given, of devices that only sample.

  Raises:
    TypeError, ValueError: see `check`.
  """
  _check_axes("rl.rollout_mesh", mesh)
  for axis, size in mesh.items():
    if size == -1:
      raise ValueError(
        f"rl.rollout_mesh.{axis} is -1; expected a number of devices. `mesh` takes "
        "those that are left"
      )


def _check_axes(key: str, mesh: dict[str, int]) -> None:
  if not isinstance(mesh, Mapping):
    raise TypeError(
      f"{key} is {mesh!r}; expected sizes by axis. Give a mapping such as "
      "{'fsdp': 4, 'tp': 2}."
    )
  for axis, size in mesh.items():
    if axis not in MESH_AXES:
      raise ValueError(
        f"{key}.{axis} is no axis of the decoder's sharding: use {', '.join(MESH_AXES)}"
      )
    checks.number(f"{key}.{axis}", size, whole=True)
    if size < 1 and size != -1:
      raise ValueError(
        f"{key}.{axis} is {size}; expected at least 1, or -1 for all remaining devices"
      )


def divided(
  rollout: Mapping[str, int], devices: Sequence[Any]
) -> tuple[Sequence[Any], Mesh | None]:
  """Divides devices into those of the key `mesh` and those that only sample.

  Args:
    rollout: sizes by axis of the devices that sample; {}: the others sample too.
    devices: all devices, of which the last ones sample.

  Returns:
    (devices of the key `mesh`, mesh of the others or None).

  Raises:
    ValueError: no device would be left to train.
  """
  if not rollout:
    return devices, None
  count = math.prod(rollout.values())
  if count >= len(devices):
    raise ValueError(
      f"rl.rollout_mesh is {dict(rollout)}, which takes {count} of {len(devices)} "
      "devices; at least one must be left to train. Make an axis smaller"
    )
  return devices[:-count], mesh_lib.create_mesh(rollout, devices[-count:])


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
  mesh: dict[str, int],
  batch_rows: dict[str, int],
  length: tuple[str, int],
  devices: Sequence[Any] | None = None,
) -> Mesh | None:
  """Builds the mesh over all devices; None for an empty mesh.

  Args:
    mesh: sizes by axis.
    batch_rows: rows of batches by key, as for `check`.
    length: keys and tokens of a row, as for `check_length`.
    devices: the devices; None: all of them.

  Raises:
    ValueError: the sizes do not fit the devices, or batches or rows do not divide over
      the mesh.
  """
  if not mesh:
    return None
  device_mesh = mesh_lib.create_mesh(mesh, devices)
  # With -1 resolved, the batches are checked again.
  sizes = {axis: int(size) for axis, size in device_mesh.shape.items()}
  check(sizes, batch_rows)
  check_length(sizes, *length)
  return device_mesh
