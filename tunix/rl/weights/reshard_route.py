"""The shardings that an array passes through on its way to another one.

Between different devices, an array is sent in shards that both sides can hold:

- The source first gathers shards as large as those of the target. It does so on an
  intermediate mesh of its own devices, whose axes are cut into two axes, `split` and
  `replica`. An array with `PartitionSpec(split)` has equal replicas along `replica`,
  and only one replica of each shard is sent.
- If the source cannot form such shards, it sends smaller ones, and the target gathers
  them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from tunix.utils import mesh as mesh_lib

_SPLIT, _REPLICA = "_intermediate_split", "_intermediate_replica"


def route(source: object, target: Sharding, shape: Sequence[int]) -> list[Sharding]:
  """Returns the shardings that an array passes through; the last one is `target`.

  If each shard of one side is a union of shards of the other, no device ever holds more
  than before or after the move. Otherwise a device holds up to 1 / n of the array,
  where n is the greatest common divisor of the number of source shards and the number
  of target devices. For n = 1 the array goes through the host. A target with one device
  needs no intermediate sharding: it receives the shards one after the other.

  Args:
    source: present sharding of the array.
    target: new sharding.
    shape: global shape of the array.
  """
  if not (isinstance(source, NamedSharding) and isinstance(target, NamedSharding)):
    return [target]
  mesh = target.mesh
  if not (isinstance(source.mesh, Mesh) and isinstance(mesh, Mesh)):
    return [target]
  old, new = _counts(source, len(shape)), _counts(target, len(shape))
  if old == new or math.prod(old) == 1:
    return [target]
  # If every target shard is a union of source shards, the source gathers first, and the
  # array is sent in one step.
  if math.prod(new) > 1 and all(o % n == 0 for o, n in zip(old, new)):
    gathered = _intermediate(source, new)
    if gathered is not None:
      return [gathered, target]
  if order(source) == order(target):  # the same devices: one compiled program
    return [target]
  # Otherwise the array is sent in the largest number of shards that both sides can
  # hold: `narrow` on the source's devices, `landing` on the target's.
  shared = _shared_counts(old, mesh.size)
  narrow, landing = _intermediate(source, shared), _landing(mesh, shared)
  if (size := source.mesh.size) < mesh.size:
    # The target has more devices than the source, and a gather there would need extra
    # memory on each of them. If possible, the source therefore regroups the shards, and
    # the target only cuts them.
    regrouped = _shared_counts(new, size)
    uncut = _intermediate(target, regrouped)
    if uncut is not None and math.prod(regrouped) >= math.prod(shared):
      shared, narrow, landing = regrouped, _landing(source.mesh, regrouped), uncut
  if narrow is None or math.prod(shared) == 1:
    return [target]
  return [narrow, landing, target]


def order(sharding: Sharding) -> tuple[Any, ...] | None:
  """Returns the devices of a sharding's mesh in order; None without a mesh.

  A compiled program changes the layout only if these devices and their order are equal.
  """
  mesh = mesh_lib.of_sharding(sharding)
  return tuple(mesh.devices.flat) if isinstance(mesh, Mesh) else None


def axis_names(entry: Any) -> tuple[str, ...]:
  """Returns the mesh axes of one entry of a PartitionSpec; () for None."""
  return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _counts(sharding: NamedSharding, ndim: int) -> list[int]:
  """Returns the number of shards along each dimension."""
  sizes = [mesh_lib.axes_size(sharding.mesh, entry) for entry in sharding.spec]
  return sizes + [1] * (ndim - len(sizes))


def _shared_counts(counts: Sequence[int], devices: int) -> list[int]:
  """Returns the largest number of shards per dimension that both sides can hold.

  Each new shard is a union of the shards in `counts`, and the total number of new
  shards divides `devices`. The dimension with the most shards gets its share first. For
  example, counts [4, 2] and 6 devices give [2, 1].
  """
  out = [1] * len(counts)
  for i in sorted(range(len(counts)), key=lambda i: -counts[i]):
    out[i] = math.gcd(counts[i], devices)
    devices //= out[i]
  return out


def _intermediate(
  sharding: NamedSharding, counts: Sequence[int]
) -> NamedSharding | None:
  """Returns a sharding of the same devices with the given, smaller numbers of shards.

  Each mesh axis that gives too many shards is cut into two axes, `split` and `replica`,
  and only `split` is in the spec. For example, if an axis of 8 devices must give 2
  shards, it becomes axes of 2 and 4. The result is None if an axis cannot be cut so.
  """
  assert isinstance(sharding.mesh, Mesh)
  sizes: dict[str, tuple[int, ...]] = {
    name: (size,) for name, size in sharding.mesh.shape.items()
  }
  spec: list[Any] = []
  for entry, count in zip(sharding.spec, counts):
    axes = []
    # `count` is the number of shards that this axis and the axes after it must give.
    for name in axis_names(entry):
      size = sharding.mesh.shape[name]
      if count % size == 0:
        axes.append(name)
        count //= size
      elif size % count == 0:
        if count > 1:
          axes.append(name + _SPLIT)
          sizes[name] = (count, size // count)
        count = 1
      else:
        return None
    if count > 1:
      return None
    spec.append(tuple(axes) or None)
  names, shape = [], []
  for name, parts in sizes.items():
    names += [name] if len(parts) == 1 else [name + _SPLIT, name + _REPLICA]
    shape += parts
  mesh = Mesh(sharding.mesh.devices.reshape(shape), tuple(names))
  return NamedSharding(mesh, PartitionSpec(*spec))


def _landing(mesh: Mesh, counts: Sequence[int]) -> NamedSharding:
  """Returns a sharding of the mesh's devices with `counts` shards along dimensions."""
  rest = mesh.size // math.prod(counts)
  names = tuple(f"dim{i}{_SPLIT}" for i in range(len(counts)))
  devices = np.asarray(mesh.devices).reshape(*counts, rest)
  return NamedSharding(Mesh(devices, (*names, _REPLICA)), PartitionSpec(*names))
