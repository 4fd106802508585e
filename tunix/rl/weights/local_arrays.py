"""Copies arrays that are spread over several processes to the devices of each process.

All processes call these functions for the same arrays, in the same order, because the
copy is a program over all of their devices. Afterwards each process has the whole array
on its own devices, and may run programs on it alone.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from tunix.utils import coordination, mesh as mesh_lib

_PROCESS = "_process"  # axis over the processes in the layout of the copy


def is_spread(x: object, target: Sharding) -> bool:
  """Returns True if `x` is on several processes and the target on this one only."""
  spread = isinstance(x, jax.Array) and not x.is_fully_addressable
  return spread and target.is_fully_addressable


def localized(x: jax.Array, target: Sharding) -> jax.Array:
  """Returns a copy of an array on devices of this process, complete when it returns.

  If the processes' devices are consecutive in the mesh of `x`, each device receives its
  shard of the result and nothing else. In another order it receives the whole array,
  from which it keeps its shard.

  Args:
    x: the array, whose mesh has the devices of all processes.
    target: sharding on a mesh of this process. The mesh is checked by `check_mesh`.

  Raises:
    TypeError: one of the shardings has no mesh.
  """
  mesh, local = mesh_lib.of_sharding(x), mesh_lib.of_sharding(target)
  if not (isinstance(mesh, Mesh) and isinstance(local, Mesh)):
    raise TypeError(
      f"the shardings are {x.sharding} and {target}; expected NamedShardings on meshes "
      "of devices"
    )
  wide = _repeated(mesh, local, target) if _is_consecutive(mesh, local) else None
  layout = NamedSharding(mesh, PartitionSpec()) if wide is None else wide
  where: Any = layout.mesh
  with mesh_lib.use_mesh(where):
    copy = _copied(layout)(x)
  by_device = {shard.device: shard.data for shard in copy.addressable_shards}
  exact = NamedSharding(local, PartitionSpec()) if wide is None else target
  parts = [by_device[device] for device in local.devices.flat]
  out = jax.make_array_from_single_device_arrays(x.shape, exact, parts)
  if wide is None:
    out = jax.device_put(out, target)
  # Without waiting, the copies of many arrays would be in memory at the same time.
  return out.block_until_ready()


def key_here(key: jax.Array) -> jax.Array:
  """Returns a random key that programs of this process alone may use."""
  data: Any = np.asarray(jax.random.key_data(key))
  return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))


def default_mesh(mesh: Mesh | None) -> Mesh:
  """Returns a mesh `tp` over the devices of this process.

  Args:
    mesh: the mesh of the actor, whose order of devices is kept; None: one device.
  """
  devices = jax.local_devices()[:1] if mesh is None else list(mesh.devices.flat)
  # A plan's devices belong to no process of this machine: those of its first host.
  me = jax.process_index()
  if me not in {device.process_index for device in devices}:
    me = devices[0].process_index
  mine = [device for device in devices if device.process_index == me]
  return mesh_lib.create_mesh({"tp": len(mine)}, mine)


def check_mesh(mesh: Mesh | None, local: Mesh) -> None:
  """Checks the meshes of all processes, which must agree on how weights are copied.

  Args:
    mesh: the mesh of the actor.
    local: the mesh that the engine of this process uses.

  Raises:
    ValueError: `local` has devices of another process, or another process's mesh has
      other axes or another place in the actor's mesh.
  """
  me = jax.process_index()
  if jax.process_count() == 1:
    return
  if other := [d for d in local.devices.flat if d.process_index != me]:
    raise ValueError(
      f"the rollout mesh has {other[0]}, which is a device of process "
      f"{other[0].process_index}, and this is process {me}: with rollout_engine "
      '"per_process" expected devices of this process, jax.local_devices()'
    )
  if mesh is not None:
    axes = {"axes": dict(local.shape), "places": _offsets(mesh, local)}
    remedy = "give every process a rollout mesh of the same axes over its own devices"
    coordination.agree("the meshes of the engines", axes, remedy)


def _offsets(mesh: Mesh, local: Mesh) -> list[int]:
  """Returns the places of the local devices in `mesh`, relative to the first."""
  places = {device: place for place, device in enumerate(mesh.devices.flat)}
  first = places[local.devices.flat[0]]
  return [places[device] - first for device in local.devices.flat]


def _is_consecutive(mesh: Mesh, local: Mesh) -> bool:
  """Returns True if the mesh is the local meshes of all processes, one after another.

  Every process finds the same, because `check_mesh` has compared the offsets.
  """
  covers = local.size * jax.process_count() == mesh.size
  return covers and _offsets(mesh, local) == list(range(local.size))


def _repeated(mesh: Mesh, local: Mesh, target: Any) -> NamedSharding:
  """Returns a sharding over all processes; its shards here are those of `target`."""
  devices = mesh.devices.reshape(-1, *local.devices.shape)
  return NamedSharding(Mesh(devices, (_PROCESS, *local.axis_names)), target.spec)


@functools.lru_cache(maxsize=1024)
def _copied(sharding: NamedSharding) -> Any:
  # `copy`, because a program that returns its argument returns the same memory, which
  # the trainer gives away in its next update.
  return jax.jit(jnp.copy, out_shardings=sharding)
