"""Sharding of batches over the current mesh."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tunix.utils import mesh as mesh_lib

_log = logging.getLogger(__name__)


def shard_input(
  input_data: object, data_sharding_axis: Sequence[str] | str, *, whole: bool = False
) -> Any:
  """Shards the first dimension of every array over the product of the named mesh axes.

  With several processes a NumPy array is this process's shard of the batch. The shards
  are joined in the order of the mesh; processes that share a shard (because an axis
  such as `tp` spans them) must pass the same rows. Without a mesh, arrays go to the
  default device. Arrays that already have the sharding are returned unchanged, and so
  are values that are no arrays (strings, numbers, None).

  Args:
    input_data: a pytree of arrays whose first dimension is the batch.
    data_sharding_axis: names of mesh axes, such as ("dp", "fsdp").
    whole: if True, each process passes the whole global batch instead of its shard.

  Returns:
    The same pytree with JAX arrays of the global shape.

  Raises:
    ValueError: The mesh lacks an axis; or, with several processes, the batch is no
      multiple of the axes' product. One process replicates such a batch, and logs one
      warning for each shape.
  """
  names = (
    (data_sharding_axis,)
    if isinstance(data_sharding_axis, str)
    else tuple(data_sharding_axis)
  )
  mesh = mesh_lib.current_mesh()
  if mesh is None:
    return jax.tree.map(_to_default_device, input_data)
  spec = PartitionSpec(names) if names else PartitionSpec()
  place = _place_whole if whole and jax.process_count() > 1 else _place
  return jax.tree.map(lambda leaf: place(leaf, mesh, spec), input_data)


def process_part(mesh: Mesh | None, axes: Sequence[str]) -> tuple[int, int]:
  """Returns the part of each global batch that this process reads from the data.

  Processes read the same part if axes that do not split the batch (tp, cp) span them.

  Args:
    mesh: the mesh of the run; None: every process reads a different part.
    axes: the mesh axes that split the batch.

  Returns: (index of the part, number of parts).

  Raises:
    ValueError: Two processes have some of their rows in common, but not all.
  """
  count = jax.process_count()
  if mesh is None or count == 1:
    return jax.process_index(), count
  columns = [i for i, name in enumerate(mesh.axis_names) if name in axes]
  held: dict[int, set[tuple[int, ...]]] = {}
  for place, device in np.ndenumerate(mesh.devices):
    rows = held.setdefault(device.process_index, set())
    rows.add(tuple(place[column] for column in columns))
  parts = sorted({tuple(sorted(rows)) for rows in held.values()})
  if sum(map(len, parts)) != len(set().union(*parts)):
    raise ValueError(
      f"on the mesh {dict(mesh.shape)} processes have some of their rows in common. "
      "Choose sizes for which two processes have all of their rows in common, or none."
    )
  if len(parts) == count:  # one part for each process, in the order of the processes
    return jax.process_index(), count
  return parts.index(tuple(sorted(held[jax.process_index()]))), len(parts)


def get_sharding(x: Any, mesh: Mesh, pspec: PartitionSpec) -> NamedSharding:
  """Returns the sharding `pspec` for `x`, or full replication if `x` does not fit.

  Replicated are numbers, scalars, arrays with fewer dimensions than `pspec` and, with
  one process, arrays whose shape is no multiple of the named axes. With several
  processes the global shape of an array counts, not that of the process's shard.

  Raises:
    ValueError: The mesh lacks an axis; or, with several processes, an array would be
      replicated, and the processes would hold different data in one array.
  """
  _check_axes(mesh, pspec)
  replicated = NamedSharding(mesh, PartitionSpec())
  if not _is_array(x) or x.ndim == 0:
    return replicated
  shape = _global_shape(x, mesh, pspec)
  entries = tuple(pspec)
  sizes = [mesh_lib.axes_size(mesh, entry) for entry in entries]
  if len(entries) <= len(shape) and all(d % n == 0 for d, n in zip(shape, sizes)):
    return NamedSharding(mesh, pspec)
  problem = (
    f"an array of shape {tuple(shape)} cannot be split as {pspec} on the mesh "
    f"{dict(mesh.shape)}: its dimensions must divide by {sizes}"
  )
  if _processes(mesh) > 1:
    raise ValueError(
      f"{problem}; replicated, each of the {_processes(mesh)} processes would hold "
      "different data under one array: change the batch size"
    )
  _warn_once(f"{problem}; it is replicated, every device computes all of it")
  return replicated


def _place(leaf: object, mesh: Mesh, spec: PartitionSpec) -> Any:
  if not _is_array(leaf):
    return leaf
  sharding = get_sharding(leaf, mesh, spec)
  if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(
    sharding, leaf.ndim
  ):
    return leaf
  if jax.process_count() == 1 or not _is_local(leaf):
    return mesh_lib.put(leaf, sharding)
  return jax.make_array_from_process_local_data(
    sharding, np.asarray(leaf), _global_shape(leaf, mesh, spec)
  )


def _place_whole(leaf: object, mesh: Mesh, spec: PartitionSpec) -> Any:
  """Shards an array that every process holds; replicates it if it does not divide."""
  if not _is_array(leaf) or not _is_local(leaf):
    return leaf
  _check_axes(mesh, spec)
  values = np.asarray(leaf)
  fitted = mesh_lib.sharding_of_spec(spec, values.shape, mesh)
  return jax.make_array_from_callback(values.shape, fitted, lambda part: values[part])


def _to_default_device(leaf: object) -> Any:
  return (
    jax.device_put(leaf) if isinstance(leaf, np.ndarray) and _is_array(leaf) else leaf
  )


def _is_array(x: object) -> bool:
  """Returns True for numeric arrays; arrays of strings or objects are not sharded."""
  return isinstance(x, jax.Array | jax.ShapeDtypeStruct) or (
    isinstance(x, np.ndarray) and x.dtype.kind not in "OUSM"
  )


def _is_local(x: object) -> bool:
  return not isinstance(x, jax.Array) or x.is_fully_addressable


def _processes(mesh: Mesh) -> int:
  return len({device.process_index for device in mesh.devices.flat})


def _check_axes(mesh: Mesh, pspec: PartitionSpec) -> None:
  for entry in pspec:
    for name in (entry,) if isinstance(entry, str) else entry or ():
      if name not in mesh.shape:
        raise ValueError(
          f"the mesh has no axis {name!r}, it has {tuple(mesh.axis_names)}: set "
          "data_sharding_axis to axes of the mesh"
        )


def _global_shape(x: Any, mesh: Mesh, pspec: PartitionSpec) -> tuple[int, ...]:
  """Returns the global shape of an array of which `x` is this process's shard."""
  shape = tuple(x.shape)
  if not _is_local(x) or jax.process_count() == 1:
    return shape
  shares = [_process_share(mesh, entry) for entry in pspec]
  shares += [(1, 1)] * (len(shape) - len(shares))
  # Rounded up, because a wrong shape may give a fraction. The caller then checks that
  # the shape is a multiple of the axes, and names it.
  return tuple(-(-size * all_ // here) for size, (here, all_) in zip(shape, shares))


def _process_share(mesh: Mesh, entry: Any) -> tuple[int, int]:
  """Returns (shards of this process, all shards) along an entry of a PartitionSpec."""
  names = () if entry is None else (entry,) if isinstance(entry, str) else entry
  columns = [mesh.axis_names.index(name) for name in names]
  held = {
    tuple(place[column] for column in columns)
    for place, device in np.ndenumerate(mesh.devices)
    if device.process_index == jax.process_index()
  }
  if not held:
    raise ValueError(
      f"process {jax.process_index()} has no device in the mesh {dict(mesh.shape)}. "
      "Shard inputs on the processes of the mesh only."
    )
  return len(held), math.prod(mesh.shape[name] for name in names)


@functools.lru_cache(maxsize=1024)
def _warn_once(message: str) -> None:
  _log.warning("%s", message)
