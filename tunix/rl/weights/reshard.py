"""Moves arrays and models between layouts and meshes.

If the shards of source and target differ, `jax.device_put` copies the whole array to
the host and keeps it there. This module avoids that copy. On the same devices, a
compiled program changes the layout. Between different devices, an array is sent in
shards that both sides can hold (reshard_route.py).

An array that is spread over processes is copied to the devices of one process by
local_arrays.py.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, Sharding

from tunix.rl.weights import local_arrays
from tunix.rl.weights.reshard_route import axis_names, order, route
from tunix.utils import checks, env, mesh as mesh_lib, optional

_log = logging.getLogger(__name__)

Move = Callable[[Any, Sharding], jax.Array]


def reshard_pytree(
  source: object, target: object, *, donate_input: bool = False
) -> Any:
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
  arrays: object,
  source_sharding: object,
  target_sharding: object,
  *,
  donate_input: bool = False,
) -> Any:
  """Returns arrays with the target shardings; `route` chooses the intermediate ones.

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
  model: nnx.Module | None, mesh: Mesh | None, replicate: bool = False
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

    def place(x: Any, declared: object = declared) -> NamedSharding:
      spec = () if replicate else _spec_of(x, declared)
      return mesh_lib.sharding_of_spec(spec, x.shape, mesh)

    moved = reshard_pytree(value, jax.tree.map(place, value))
    del value  # the old array is freed here, before the next variable moves
    node.set_value(moved)
  return model


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
  x: object, source: Sharding | None, target: Sharding, move: Move, donate: bool
) -> Any:
  if isinstance(x, jax.ShapeDtypeStruct):  # a plan moves nothing
    return x.update(sharding=target)
  traced = isinstance(x, Tracer)
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
  if order(present) is not None and order(present) == order(sharding):
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
  mesh = mesh_lib.of_sharding(sharding)
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


def _leafwise(layouts: object, arrays: object) -> list[Sharding]:
  """Returns the sharding of each leaf of `arrays`, from a tree that may be a prefix."""

  def is_sharding(x):
    return isinstance(x, Sharding)

  leaves = jax.tree.broadcast(layouts, arrays, is_leaf=is_sharding)
  out = []
  for leaf in jax.tree.leaves(leaves, is_leaf=is_sharding):
    sharding = leaf if is_sharding(leaf) else mesh_lib.sharding_of(leaf)
    if not isinstance(sharding, Sharding):
      raise TypeError(
        f"a target is {checks.type_of(leaf)}, which has no sharding: give shardings, "
        "or arrays with the shardings of the result"
      )
    out.append(sharding)
  return out


def _spec_of(x: Any, declared: Any) -> Any:
  """Returns the entries of the PartitionSpec that a variable keeps on any mesh.

  See `reshard_model_to_mesh`.
  """
  sharding = mesh_lib.sharding_of(x)
  if isinstance(declared, NamedSharding):
    declared = declared.spec
  declared = tuple(declared or ())
  if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
    return declared
  entries = list(sharding.spec) + [None] * (x.ndim - len(sharding.spec))
  used = {name for entry in entries for name in axis_names(entry)}
  for i, entry in enumerate(declared[: x.ndim]):
    names = set(axis_names(entry))
    if entries[i] is None and not names & (used | set(sharding.mesh.axis_names)):
      entries[i] = entry
  return tuple(entries)


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
