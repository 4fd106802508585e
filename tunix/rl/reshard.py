"""Moves arrays and models between layouts and meshes.

If the shards of source and target differ, `jax.device_put` copies the whole array to
the host and keeps it there. This module avoids that copy. On the same devices, a
compiled program changes the layout. Between different devices, an array is sent in
shards that both sides can hold:

- The source first gathers shards as large as those of the target. It does so on an
  intermediate mesh of its own devices, whose axes are cut into two axes, `split` and
  `replica`. An array with `PartitionSpec(split)` has equal replicas along `replica`,
  and only one replica of each shard is sent.
- If the source cannot form such shards, it sends smaller ones, and the target gathers
  them.

An array that is spread over processes is copied to the devices of one process by
local_arrays.py.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from tunix.rl import local_arrays
from tunix.utils import env, mesh as mesh_lib, optional

_log = logging.getLogger(__name__)

Move = Callable[[Any, Sharding], jax.Array]

_SPLIT, _REPLICA = "_intermediate_split", "_intermediate_replica"


def reshard_pytree(source: Any, target: Any, *, donate_input: bool = False) -> Any:
  """Returns the arrays of `source` with the shardings of `target`.

  Args:
    source: a pytree of arrays.
    target: a sharding; or a pytree of shardings, or of arrays or shapes that have
      shardings. The pytree may be a prefix of `source`.
    donate_input: if True, each source array is deleted when its copy has arrived,
      unless the result uses the same memory.

  Raises:
    ValueError: the trees do not match, or a sharding does not divide a shape.
    TypeError: a leaf of `target` has no sharding.
  """
  return reshard_arrays(source, None, target, donate_input=donate_input)


def reshard_arrays(
  arrays: Any, source_sharding: Any, target_sharding: Any, *, donate_input: bool = False
) -> Any:
  """Returns arrays with the target shardings; see `route` for intermediate shardings.

  If JAX runs through Pathways and pathwaysutils is installed, pathwaysutils moves the
  arrays. Without pathwaysutils the first call logs a warning. Inside `jax.jit` all
  shardings must have the same devices.

  Args:
    arrays: a pytree of arrays; NumPy arrays are placed on the target directly.
    source_sharding: the present sharding or a pytree of them; None reads it from the
      arrays, which is not possible inside `jax.jit`.
    target_sharding, donate_input: see `reshard_pytree`.

  Raises:
    ValueError: an array has another sharding than `source_sharding`; or see
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
  """Moves the variables of a module to another mesh, in place.

  A variable keeps those axes of its PartitionSpec that the new mesh has and that divide
  the shape. A dimension that is not split now may have axes in the variable's
  `out_sharding` metadata. If the present mesh lacks these axes, they split the
  dimension on the new mesh, so that moving to a smaller mesh and back restores the
  layout. One variable moves at a time, and its old array is freed if nothing else
  refers to it. Modules that shared an array before have separate arrays afterwards.

  Args:
    model: an nnx module.
    mesh: the new mesh; None leaves the module unchanged.
    replicate: if True, every device gets the whole module.

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
    declared = None if replicate else mesh_lib.declared_spec(node)

    def place(x: Any, declared: Any = declared) -> NamedSharding:
      spec = () if replicate else _spec_of(x, declared)
      return mesh_lib.sharding_of_spec(spec, x.shape, mesh)

    moved = reshard_pytree(value, jax.tree.map(place, value))
    del value  # the old array is freed here, before the next variable moves
    node.set_value(moved)
  return model


def route(source: Any, target: Sharding, shape: Sequence[int]) -> list[Sharding]:
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
  if _order(source) == _order(target):  # the same devices: one compiled program
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


def landed(arrays: dict[str, jax.Array], target: dict[str, Sharding]) -> dict[str, Any]:
  """Sends arrays to the devices of `target`, and starts no program there.

  An array may arrive in another layout, which `laid_out` changes. So the thread that
  owns these devices is the only one that starts programs on them.
  """
  return {path: _landed(x, target[path]) for path, x in arrays.items()}


def _landed(x: jax.Array, target: Sharding) -> jax.Array:
  if local_arrays.is_spread(x, target):
    return local_arrays.localized(x, target)
  move = _pathways() or _move
  for sharding in route(x.sharding, target, x.shape):
    if x.sharding.device_set == target.device_set:
      break
    x = move(x, sharding).block_until_ready()
  return x


def laid_out(x: jax.Array, target: Sharding) -> jax.Array:
  """Returns an array that `landed` has sent, in the layout of `target`."""
  return x if x.sharding == target else (_pathways() or _move)(x, target)


def _one(
  x: Any, source: Sharding | None, target: Sharding, move: Move, donate: bool
) -> Any:
  if isinstance(x, jax.ShapeDtypeStruct):  # a plan moves nothing
    return x.update(sharding=target)
  traced = isinstance(x, jax.core.Tracer)
  if not isinstance(x, jax.Array):
    return mesh_lib.put(x, target)
  if not traced and local_arrays.is_spread(x, target):
    return local_arrays.localized(x, target)
  if not traced:
    _check_source(x, source)
    source = x.sharding
  stages = route(source, target, x.shape)
  out = x
  if traced:
    for sharding in stages:
      out = jax.lax.with_sharding_constraint(out, sharding)
    return out
  memory = _buffers(x) if donate else set()
  for sharding in stages:
    out = move(out, sharding)
    if donate or len(stages) > 1:
      # Dispatch is asynchronous: without waiting, the stages of many arrays would be in
      # memory at the same time.
      out.block_until_ready()
    # The source is deleted after the first stage. Deleted at the end, it would be in
    # memory together with two stages.
    if donate and not x.is_deleted() and not memory & _buffers(out):
      x.delete()
  return out


def _move(x: jax.Array, sharding: Sharding) -> jax.Array:
  """Moves an array to a sharding, outside of `jax.jit`."""
  present = x.sharding
  equivalent = present.is_equivalent_to(sharding, x.ndim)
  if equivalent or present.memory_kind != sharding.memory_kind:
    return jax.device_put(x, sharding)
  if _order(present) is not None and _order(present) == _order(sharding):
    # jax.jit requires the devices of the mesh in the context, and the caller's mesh may
    # have other devices than this array.
    with mesh_lib.use_mesh(_mesh_of(sharding)):
      return _lay_out(sharding)(x)
  several = len(sharding.device_set) > 1
  if several or x.is_fully_replicated or not x.is_fully_addressable:
    return jax.device_put(x, sharding)
  with mesh_lib.use_mesh(_mesh_of(sharding)):
    return _join(x, sharding)


def _mesh_of(sharding: Sharding) -> Mesh:
  """Returns the mesh of a sharding; a mesh of one device if it has none."""
  mesh = getattr(sharding, "mesh", None)
  return (
    Mesh(np.array(list(sharding.device_set)), ("device",)) if mesh is None else mesh
  )


def _join(x: jax.Array, sharding: Sharding) -> jax.Array:
  """Gathers an array on one device, which holds the array and one more shard."""
  out = jnp.zeros(x.shape, x.dtype, device=sharding)
  for shard in x.addressable_shards:
    if shard.replica_id == 0:
      start = [cut.start or 0 for cut in shard.index]
      out = _write(sharding)(out, jax.device_put(shard.data, sharding), start)
      out.block_until_ready()  # otherwise all shards would be in memory at once
  return out


@functools.lru_cache(maxsize=1024)
def _write(sharding: Sharding) -> Any:
  return jax.jit(jax.lax.dynamic_update_slice, donate_argnums=0, out_shardings=sharding)


@functools.lru_cache(maxsize=1024)
def _lay_out(sharding: Sharding) -> Any:
  return jax.jit(lambda x: x, out_shardings=sharding)


def _order(sharding: Sharding) -> tuple[Any, ...] | None:
  """Returns the devices of a sharding's mesh in order; None without a mesh.

  A compiled program changes the layout only if these devices and their order are equal.
  """
  mesh = getattr(sharding, "mesh", None)
  return tuple(mesh.devices.flat) if isinstance(mesh, Mesh) else None


def _check_source(x: jax.Array, source: Sharding | None) -> None:
  if source is not None and not x.sharding.is_equivalent_to(source, x.ndim):
    raise ValueError(
      f"source_sharding is {source} for an array of shape {x.shape} with sharding "
      f"{x.sharding}: pass the sharding of the array, or None"
    )


def _buffers(x: jax.Array) -> set[tuple[int, int]]:
  """Returns the device and the address of each shard of this process."""
  return {
    (shard.device.id, shard.data.unsafe_buffer_pointer())
    for shard in x.addressable_shards
  }


def _leafwise(layouts: Any, arrays: Any) -> list[Sharding]:
  """Returns the sharding of each leaf of `arrays`, from a tree that may be a prefix."""
  is_sharding = lambda x: isinstance(x, Sharding)
  leaves = jax.tree.broadcast(layouts, arrays, is_leaf=is_sharding)
  out = []
  for leaf in jax.tree.leaves(leaves, is_leaf=is_sharding):
    sharding = leaf if is_sharding(leaf) else getattr(leaf, "sharding", None)
    if not isinstance(sharding, Sharding):
      raise TypeError(
        f"a target is a {type(leaf).__name__}, which has no sharding: give shardings, "
        "or arrays with the shardings of the result"
      )
    out.append(sharding)
  return out


def _spec_of(x: Any, declared: Any) -> Any:
  """Returns the entries of the PartitionSpec that a variable keeps on any mesh.

  See `reshard_model_to_mesh`.
  """
  sharding = getattr(x, "sharding", None)
  if isinstance(declared, NamedSharding):
    declared = declared.spec
  declared = tuple(declared or ())
  if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
    return declared
  entries = list(sharding.spec) + [None] * (x.ndim - len(sharding.spec))
  used = {name for entry in entries for name in _names(entry)}
  for i, entry in enumerate(declared[: x.ndim]):
    names = set(_names(entry))
    if entries[i] is None and not names & (used | set(sharding.mesh.axis_names)):
      entries[i] = entry
  return tuple(entries)


def _names(entry: Any) -> tuple[str, ...]:
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
    kept = []
    # `count` is the number of shards that this axis and the axes after it must give.
    for name in _names(entry):
      size = sharding.mesh.shape[name]
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
  mesh = Mesh(sharding.mesh.devices.reshape(shape), tuple(names))
  return NamedSharding(mesh, PartitionSpec(*spec))


def _landing(mesh: Mesh, counts: Sequence[int]) -> NamedSharding:
  """Returns a sharding of the mesh's devices with `counts` shards along dimensions."""
  rest = mesh.size // math.prod(counts)
  names = tuple(f"dim{i}{_SPLIT}" for i in range(len(counts)))
  devices = np.asarray(mesh.devices).reshape(*counts, rest)
  return NamedSharding(Mesh(devices, (*names, _REPLICA)), PartitionSpec(*names))


def _pathways() -> Move | None:
  """Returns the function that moves arrays under Pathways; None without Pathways."""
  if not env.pathways_available():
    return None
  try:
    module = optional.require(
      "pathwaysutils.experimental.reshard", "moving arrays on Pathways", "pathwaysutils"
    )
  except ImportError as error:
    _warn_once(str(error))
    return None
  return module.reshard


@functools.cache  # one line a process: every weight sync asks for `_pathways`
def _warn_once(problem: str) -> None:
  _log.warning("%s; JAX moves the arrays, perhaps through the host's memory", problem)
