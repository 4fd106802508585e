"""Device meshes: the only file that asks JAX which mesh is current.

A run works with no mesh, under `jax.set_mesh(mesh)`, under the legacy `with mesh:`,
and with Auto or Explicit axes. Explicit meshes are rebuilt as Auto: plain einsums
and concatenations of a model raise on Explicit axes. Arrays change between the two
without moving: `on_auto` and `onto` give other views of the same buffers.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec


def to_host(tree: Any) -> Any:
  """A pytree with its JAX arrays as NumPy's, whole on every process. All processes of a
  run call it where the arrays are spread over them. Of a shape, whose numbers nobody
  has computed (see `tunix.perf.programs`), ones."""
  if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree)):
    return jax.tree.map(lambda x: np.ones(x.shape, x.dtype), tree)
  if all(getattr(x, "is_fully_addressable", True) for x in jax.tree.leaves(tree)):
    return jax.device_get(tree)
  from jax.experimental import multihost_utils

  def one(leaf):
    spread = isinstance(leaf, jax.Array) and not (
      leaf.is_fully_addressable or leaf.is_fully_replicated
    )
    if not spread:
      return jax.device_get(leaf)
    return multihost_utils.process_allgather(leaf, tiled=True)

  return jax.tree.map(one, tree)


def create_mesh(axes: Mapping[str, int], devices: Any = None) -> Mesh:
  """Builds a mesh with Auto axes from `{"fsdp": 4, "tp": 2}`.

  Args:
    axes: sizes by axis name, in order. One size may be -1: what the others leave.
    devices: the devices to use; all of `jax.devices()` when None.

  Raises:
    ValueError: the sizes do not multiply to the number of devices.
  """
  devices = list(jax.devices()) if devices is None else list(devices)
  sizes = dict(axes)
  unknown = [name for name, size in sizes.items() if size == -1]
  known = math.prod(size for size in sizes.values() if size != -1)
  if any(size < 1 and size != -1 for size in sizes.values()) or len(unknown) > 1:
    raise ValueError(
      f"mesh {sizes}: sizes must be at least 1, and one of them may be -1"
    )
  if unknown:
    sizes[unknown[0]] = len(devices) // known
  total = math.prod(sizes.values())
  if total != len(devices):
    raise ValueError(
      f"mesh {dict(axes)} needs {max(total, known)} devices, there are {len(devices)}: "
      "choose sizes whose product is that number"
    )
  kinds = (AxisType.Auto,) * len(sizes)
  return jax.make_mesh(
    tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices
  )


def auto(mesh: Mesh) -> Mesh:
  """The same mesh with Auto axes."""
  if all(kind == AxisType.Auto for kind in mesh.axis_types):
    return mesh
  return Mesh(mesh.devices, mesh.axis_names)


def is_explicit(mesh: Mesh | AbstractMesh) -> bool:
  """Whether an axis of the mesh is Explicit, as `jax.make_mesh` makes them."""
  return AxisType.Explicit in mesh.axis_types


def explicit_mesh(tree: Any) -> Mesh | None:
  """The user's mesh with Explicit axes: the current one, or that of a pytree's arrays;
  None if both are Auto or there is none."""
  context = jax.sharding.get_abstract_mesh()  # which traced code may ask for, too
  if not context.empty:
    mesh = jax.sharding.get_mesh() if is_explicit(context) else None
    return mesh if isinstance(mesh, Mesh) else None
  for leaf in jax.tree.leaves(tree):
    if (mesh := _explicit_mesh_of(leaf)) is not None:
      return mesh
  return None


def _explicit_mesh_of(leaf: Any) -> Mesh | None:
  mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
  return mesh if isinstance(mesh, Mesh) and is_explicit(mesh) else None


def on_auto(tree: Any) -> Any:
  """The arrays of a pytree that lie on an Explicit mesh as arrays on the same mesh with
  Auto axes; everything else as it is. Nothing is copied."""

  def one(leaf):
    mesh = _explicit_mesh_of(leaf)
    return leaf if mesh is None else onto(leaf, auto(mesh))

  return jax.tree.map(one, tree)


def onto(tree: Any, mesh: Mesh) -> Any:
  """Arrays as arrays on `mesh`, which differs from theirs in the kinds of its axes
  alone. Nothing is copied."""

  def one(leaf):
    if not isinstance(leaf, jax.Array) or not isinstance(leaf.sharding, NamedSharding):
      return leaf
    # Under no other mesh: device_put compares it with the target.
    with jax.set_mesh(mesh):
      return jax.device_put(leaf, NamedSharding(mesh, leaf.sharding.spec))

  return jax.tree.map(one, tree)


def current_mesh() -> Mesh | None:
  """The mesh set by `jax.set_mesh` or `with mesh:`, with Auto axes; None if none.

  For code outside `jax.jit`; traced code asks `context_mesh`.
  """
  mesh = jax.sharding.get_mesh()
  if isinstance(mesh, Mesh) and not mesh.empty:
    return auto(mesh)
  return _legacy_mesh()


def context_mesh() -> Mesh | AbstractMesh | None:
  """The mesh that code being traced runs under: under `jax.set_mesh` only its shape
  is known then; None if there is none or it has one device."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    mesh = _legacy_mesh()
  return None if mesh is None or mesh.size == 1 else mesh


def context_platform() -> str:
  """ "cpu", "gpu" or "tpu": what the code being traced will run on.

  The platform of the context's mesh, which may be a topology that this machine does
  not have; without a mesh, JAX's default backend.
  """
  mesh = jax.sharding.get_abstract_mesh()
  device = None if mesh.empty else mesh.abstract_device
  if device is None:
    legacy = _legacy_mesh()
    device = None if legacy is None else legacy.devices.flat[0]
  platform = jax.default_backend() if device is None else device.platform
  return "gpu" if platform in ("cuda", "rocm") else platform


def _legacy_mesh() -> Mesh | None:
  """The mesh of `with mesh:`, which JAX keeps apart."""
  with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.interpreters import pxla

    legacy = pxla.thread_resources.env.physical_mesh
  return None if legacy.empty else auto(legacy)


def mesh_of(tree: Any) -> Mesh | None:
  """The mesh that the arrays of a pytree are laid out on; None if on one device."""
  for leaf in jax.tree.leaves(tree):
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
      mesh = sharding.mesh
      return auto(mesh) if isinstance(mesh, Mesh) else None
  return None


@contextlib.contextmanager
def use_mesh(mesh: Mesh | None) -> Iterator[None]:
  """`jax.set_mesh(mesh)`, or nothing for None."""
  if mesh is None:
    yield
  else:
    with jax.set_mesh(mesh):
      yield


def axes_size(mesh: Mesh | AbstractMesh, axes: Any) -> int:
  """Number of shards along one entry of a PartitionSpec (a name, names, or None)."""
  if axes is None:
    return 1
  names = (axes,) if isinstance(axes, str) else axes
  return math.prod(mesh.shape[name] for name in names)


def fit_spec(
  spec: Any, shape: tuple[int, ...], mesh: Mesh | AbstractMesh
) -> PartitionSpec:
  """`spec` without the axes that the mesh lacks, and of a dimension's axes those that
  divide it together, from the first on."""
  out = []
  for size, entry in zip(shape, tuple(spec) + (None,) * (len(shape) - len(spec))):
    names = (entry,) if isinstance(entry, str) else tuple(entry or ())
    names = tuple(name for name in names if name in mesh.shape)
    while names and size % axes_size(mesh, names):
      names = names[:-1]
    out.append((names[0] if len(names) == 1 else names) if names else None)
  return PartitionSpec(*out)


def constrain(x: jax.Array, *spec: Any) -> jax.Array:
  """Pins `x` to a PartitionSpec on the context's mesh; the identity without one.

  Axes that the mesh lacks or that do not divide are dropped: pinning is a hint
  about layout and never changes values.
  """
  mesh = context_mesh()
  if mesh is None:
    return x
  fitted = fit_spec(spec, x.shape, mesh)
  where = NamedSharding(mesh, fitted) if isinstance(mesh, Mesh) else fitted
  return jax.lax.with_sharding_constraint(x, where)


def put(x: Any, sharding: Any) -> Any:
  """An array laid out; a shape, or an array that is to go to devices that programs are
  only compiled for, as a shape."""
  mesh = getattr(sharding, "mesh", None)
  if isinstance(x, jax.ShapeDtypeStruct) or (mesh is not None and is_planned(mesh)):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
  return jax.device_put(x, sharding)


def is_planned(mesh: Mesh) -> bool:
  """Whether its devices are those of a topology (`jax.experimental.topologies`), which
  can be compiled for and hold nothing."""
  device = mesh.devices.flat[0]
  return device.client.runtime_type == "compile_only_runtime"


def sharding_of_spec(spec: Any, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
  """`spec` (axis names by dimension, a PartitionSpec, a NamedSharding, or None) as a
  sharding on `mesh`; axes that the mesh lacks or that do not divide are dropped."""
  if isinstance(spec, NamedSharding):
    spec = spec.spec
  return NamedSharding(mesh, fit_spec(spec or (), shape, mesh))
