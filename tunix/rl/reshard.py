"""Moves arrays and models between layouts and meshes.

`jax.device_put` fetches an array to the host whole, and keeps it there, when the shards
before and after differ. Here a new layout on the same devices is a compiled program,
and between devices an array crosses in shards that both sides have: the source first
gathers as much as a device of the target will hold (on an intermediate mesh whose axes
are cut into `split` and `replica`, with `PartitionSpec(split)`), and any replica goes
over; or the target takes narrower shards and puts them together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from tunix.utils import env, mesh as mesh_lib, optional

Move = Callable[[Any, Sharding], jax.Array]

_SPLIT, _REPLICA = "_intermediate_split", "_intermediate_replica"


def reshard_pytree(source: Any, target: Any, *, donate_input: bool = False) -> Any:
  """The arrays of `source`, laid out as `target` is.

  Args:
    source: a pytree of arrays.
    target: one sharding, a pytree of them, or of arrays (or shapes with shardings)
      that lie where the result shall; it may be a prefix of `source`.
    donate_input: delete each array as soon as it has arrived, but for those whose
      memory the result uses.

  Raises:
    ValueError: the trees do not match, or a layout does not divide a shape.
    TypeError: a leaf of `target` says nothing of a layout.
  """
  return reshard_arrays(source, None, target, donate_input=donate_input)


def reshard_arrays(
  arrays: Any, source_sharding: Any, target_sharding: Any, *, donate_input: bool = False
) -> Any:
  """`arrays` on the target's shardings, by way of an intermediate one where that
  spares memory; see `route`.

  Where pathwaysutils is installed and JAX runs through Pathways it does the moving.
  Inside `jax.jit` the devices of all layouts must be the same.

  Args:
    arrays: a pytree of arrays; NumPy arrays go straight to the target.
    source_sharding: how they lie, one sharding or a pytree; None: as the arrays say
      (in `jax.jit` they cannot).
    target_sharding, donate_input: see `reshard_pytree`.

  Raises:
    ValueError: an array does not lie as `source_sharding` says; or see
      `reshard_pytree`.
    TypeError: see `reshard_pytree`.
  """
  leaves, treedef = jax.tree.flatten(arrays)
  targets = _leafwise(target_sharding, arrays)
  sources = [None] * len(leaves)
  if source_sharding is not None:
    sources = _leafwise(source_sharding, arrays)
  move = _pathways() or _move
  return treedef.unflatten(
    _one(leaf, source, target, move, donate_input)
    for leaf, source, target in zip(leaves, sources, targets)
  )


def reshard_model_to_mesh(
  model: Any, mesh: Mesh | None, replicate: bool = False
) -> Any:
  """Lays a module out on another mesh, in place.

  A variable keeps its PartitionSpec as far as the mesh has those axes and they divide
  its shape. What is whole now is split as its `out_sharding` metadata says, and so are
  dimensions whose axes the present mesh lacks: to a smaller mesh and back changes
  nothing. One variable moves at a time, and its old array is freed when nobody else
  holds it; modules that shared it share nothing afterwards.

  Args:
    model: an nnx module.
    mesh: where to; None leaves it where it is.
    replicate: every device gets all of it.

  Returns:
    `model`.
  """
  if mesh is None:
    return model
  mesh = mesh_lib.auto(mesh)
  for _, node in nnx.iter_graph(model):
    if not isinstance(node, nnx.Variable):
      continue
    value = node.get_value()
    declared = None if replicate else node.get_metadata().get("out_sharding")

    def place(x: Any, declared: Any = declared) -> NamedSharding:
      spec = () if replicate else _spec_of(x, declared)
      return mesh_lib.sharding_of_spec(spec, x.shape, mesh)

    moved = reshard_pytree(value, jax.tree.map(place, value))
    del value
    node.set_value(moved)
  return model


def route(source: Any, target: Sharding, shape: Sequence[int]) -> list[Sharding]:
  """The layouts that an array passes through, the last of them `target`.

  On the way a device holds no more than it did or will; or, where the shards on the two
  sides do not fit into each other, 1 / n of the array, n the common divisor of the
  source's shards and the target's devices. A target of one device, or n = 1, is
  reached directly: the one shard by shard, the other through the host.

  Args:
    source: how the array lies.
    target: how it shall lie.
    shape: its global shape.
  """
  if not (isinstance(source, NamedSharding) and isinstance(target, NamedSharding)):
    return [target]
  mesh = target.mesh
  if not (isinstance(source.mesh, Mesh) and isinstance(mesh, Mesh)):
    return [target]
  have, want = _counts(source, len(shape)), _counts(target, len(shape))
  if have == want or math.prod(have) == 1:
    return [target]
  if math.prod(want) > 1 and all(h % w == 0 for h, w in zip(have, want)):
    gathered = _intermediate(source, want)
    if gathered is not None:
      return [gathered, target]
  if _order(source) == _order(target):
    return [target]
  shared = _shared_counts(have, mesh.size)
  narrow, landing = _intermediate(source, shared), _landing(mesh, shared)
  if (size := source.mesh.size) < mesh.size:
    # The replicas will be on the target's side, where a program that moves shards
    # between devices takes room for each: let the source do that, and the target cut.
    wanted = _shared_counts(want, size)
    uncut = _intermediate(target, wanted)
    if uncut is not None and math.prod(wanted) >= math.prod(shared):
      shared, narrow, landing = wanted, _landing(source.mesh, wanted), uncut
  if narrow is None or math.prod(shared) == 1:
    return [target]
  return [narrow, landing, target]


def _one(
  x: Any, source: Sharding | None, target: Sharding, move: Move, donate: bool
) -> jax.Array:
  traced = isinstance(x, jax.core.Tracer)
  if not isinstance(x, jax.Array):
    return mesh_lib.put(x, target)
  if not traced:
    _check_source(x, source)
    source = x.sharding
  stages = route(source, target, x.shape)
  out = x
  if traced:
    for where in stages:
      out = jax.lax.with_sharding_constraint(out, where)
    return out
  memory = _buffers(x) if donate else set()
  for where in stages:
    out = move(out, where)
    if donate or len(stages) > 1:
      out.block_until_ready()  # or the stages of many arrays are alive at once
    # Not at the end: with the source, two stages and their copies would be alive.
    if donate and not x.is_deleted() and not memory & _buffers(out):
      x.delete()
  return out


def _move(x: jax.Array, where: Sharding) -> jax.Array:
  """One stage, eagerly."""
  here = x.sharding
  if here.is_equivalent_to(where, x.ndim) or here.memory_kind != where.memory_kind:
    return jax.device_put(x, where)
  if _order(here) is not None and _order(here) == _order(where):
    # The mesh that the caller has set may be of other devices.
    with mesh_lib.use_mesh(_mesh_of(where)):
      return _lay_out(where)(x)
  if len(where.device_set) > 1 or x.is_fully_replicated or not x.is_fully_addressable:
    return jax.device_put(x, where)
  with mesh_lib.use_mesh(_mesh_of(where)):
    return _join(x, where)


def _mesh_of(where: Sharding) -> Mesh:
  """The mesh of a layout; of one device without one, a mesh of it."""
  mesh = getattr(where, "mesh", None)
  return Mesh(np.array(list(where.device_set)), ("device",)) if mesh is None else mesh


def _join(x: jax.Array, where: Sharding) -> jax.Array:
  """All of `x` on one device, which holds no more than that and a shard."""
  out = jnp.zeros(x.shape, x.dtype, device=where)
  for shard in x.addressable_shards:
    if shard.replica_id == 0:
      start = [cut.start or 0 for cut in shard.index]
      out = _write(where)(out, jax.device_put(shard.data, where), start)
      out.block_until_ready()  # or all shards come at once
  return out


@functools.lru_cache(maxsize=1024)
def _write(where: Sharding) -> Any:
  return jax.jit(jax.lax.dynamic_update_slice, donate_argnums=0, out_shardings=where)


@functools.lru_cache(maxsize=1024)
def _lay_out(where: Sharding) -> Any:
  return jax.jit(lambda x: x, out_shardings=where)


def _order(where: Sharding) -> tuple[Any, ...] | None:
  """The devices of a mesh in its order, which a program keeps."""
  mesh = getattr(where, "mesh", None)
  return tuple(mesh.devices.flat) if isinstance(mesh, Mesh) else None


def _check_source(x: jax.Array, source: Sharding | None) -> None:
  if source is not None and not x.sharding.is_equivalent_to(source, x.ndim):
    raise ValueError(
      f"an array of shape {x.shape} lies on {x.sharding}, source_sharding says "
      f"{source}: pass the layout that it has, or None"
    )


def _buffers(x: jax.Array) -> set[tuple[int, int]]:
  """Which memory on which device an array uses here."""
  return {
    (shard.device.id, shard.data.unsafe_buffer_pointer())
    for shard in x.addressable_shards
  }


def _leafwise(layouts: Any, arrays: Any) -> list[Sharding]:
  """One sharding for each leaf of `arrays`, from a tree that may be a prefix."""
  is_layout = lambda x: isinstance(x, Sharding)
  spread = jax.tree.broadcast(layouts, arrays, is_leaf=is_layout)
  out = []
  for leaf in jax.tree.leaves(spread, is_leaf=is_layout):
    where = leaf if is_layout(leaf) else getattr(leaf, "sharding", None)
    if not isinstance(where, Sharding):
      raise TypeError(
        f"a target of type {type(leaf).__name__} has no layout: give shardings, or "
        "arrays that lie where the result shall"
      )
    out.append(where)
  return out


def _spec_of(x: Any, declared: Any) -> Any:
  """The entries of the PartitionSpec that a variable's array keeps; see
  `reshard_model_to_mesh`."""
  where = getattr(x, "sharding", None)
  if isinstance(declared, NamedSharding):
    declared = declared.spec
  declared = tuple(declared or ())
  if not isinstance(where, NamedSharding) or where.is_fully_replicated:
    return declared
  entries = list(where.spec) + [None] * (x.ndim - len(where.spec))
  used = {name for entry in entries for name in _names(entry)}
  for i, entry in enumerate(declared[: x.ndim]):
    names = set(_names(entry))
    if entries[i] is None and not names & (used | set(where.mesh.axis_names)):
      entries[i] = entry
  return tuple(entries)


def _names(entry: Any) -> tuple[str, ...]:
  return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _counts(where: NamedSharding, ndim: int) -> list[int]:
  """Shards along each dimension."""
  sizes = [mesh_lib.axes_size(where.mesh, entry) for entry in where.spec]
  return sizes + [1] * (ndim - len(sizes))


def _shared_counts(have: Sequence[int], devices: int) -> list[int]:
  """Shards along each dimension that are made of whole ones of `have` and that so many
  devices can hold apart; as many as there can be, first where `have` has most."""
  out = [1] * len(have)
  for i in sorted(range(len(have)), key=lambda i: -have[i]):
    out[i] = math.gcd(have[i], devices)
    devices //= out[i]
  return out


def _intermediate(where: NamedSharding, counts: Sequence[int]) -> NamedSharding | None:
  """The same devices with fewer shards: every mesh axis that splits more than is
  wanted is cut in two, and its `replica` part left out of the spec. None where an axis
  cannot be cut so."""
  assert isinstance(where.mesh, Mesh)
  sizes: dict[str, tuple[int, ...]] = {
    name: (size,) for name, size in where.mesh.shape.items()
  }
  spec: list[Any] = []
  for entry, count in zip(where.spec, counts):
    kept = []
    for name in _names(entry):
      size = where.mesh.shape[name]
      if count % size == 0:
        kept.append(name)
        count //= size
      elif size % count == 0:
        if count > 1:
          kept.append(name + _SPLIT)
          sizes[name] = (count, size // count)
        count = 1
      else:
        return None
    if count > 1:
      return None
    spec.append(tuple(kept) or None)
  names, shape = [], []
  for name, parts in sizes.items():
    names += [name] if len(parts) == 1 else [name + _SPLIT, name + _REPLICA]
    shape += parts
  mesh = Mesh(where.mesh.devices.reshape(shape), tuple(names))
  return NamedSharding(mesh, PartitionSpec(*spec))


def _landing(mesh: Mesh, counts: Sequence[int]) -> NamedSharding:
  """The target's devices, holding so many shards along each dimension."""
  rest = mesh.size // math.prod(counts)
  names = tuple(f"dim{i}{_SPLIT}" for i in range(len(counts)))
  devices = np.asarray(mesh.devices).reshape(*counts, rest)
  return NamedSharding(Mesh(devices, (*names, _REPLICA)), PartitionSpec(*names))


def _pathways() -> Move | None:
  """What moves arrays between slices under Pathways, None elsewhere."""
  if not env.pathways_available():
    return None
  try:
    module = optional.require(
      "pathwaysutils.experimental.reshard", "moving arrays on Pathways", "pathwaysutils"
    )
  except ImportError:
    return None
  return module.reshard
