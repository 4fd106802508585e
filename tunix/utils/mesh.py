"""Device meshes: creation, the current mesh, and placement of arrays.

No other file asks JAX for the current mesh. A run works without a mesh, under
`jax.set_mesh(mesh)` and under the legacy `with mesh:`, with Auto or Explicit axes.
Meshes with Explicit axes are rebuilt with Auto axes, because plain einsums and
concatenations of a model raise on Explicit axes. `on_auto` and `onto` convert arrays
between both kinds of mesh. They return views of the same buffers.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import (
  AbstractMesh,
  AxisType,
  Mesh,
  NamedSharding,
  PartitionSpec,
  Sharding,
)


def to_host(tree: object) -> Any:
  """Returns a pytree with its JAX arrays as NumPy arrays, whole on every process.

  If arrays are spread over processes, all of these processes must call it. A
  `ShapeDtypeStruct`, which stands for an array in a plan (see `tunix.perf.programs`),
  becomes an array of ones.
  """
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
    axes: {axis: size} in order. One size may be -1: all devices that the others leave.
    devices: the devices to use; None: all of `jax.devices()`.

  Raises:
    ValueError: the product of the sizes is not the number of devices.
  """
  devices = list(jax.devices()) if devices is None else list(devices)
  sizes = dict(axes)
  unknown = [name for name, size in sizes.items() if size == -1]
  least = math.prod(size for size in sizes.values() if size != -1)
  if any(size < 1 and size != -1 for size in sizes.values()) or len(unknown) > 1:
    raise ValueError(
      f"mesh {sizes}: sizes must be at least 1, and one of them may be -1"
    )
  if unknown:
    sizes[unknown[0]] = len(devices) // least
  total = math.prod(sizes.values())
  if total != len(devices):
    raise ValueError(
      f"mesh {dict(axes)} needs {max(total, least)} devices, there are {len(devices)}: "
      "choose sizes whose product is that number"
    )
  kinds = (AxisType.Auto,) * len(sizes)
  return jax.make_mesh(
    tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices
  )


def auto(mesh: Mesh) -> Mesh:
  """Returns the same mesh with Auto axes."""
  if all(kind == AxisType.Auto for kind in mesh.axis_types):
    return mesh
  return Mesh(mesh.devices, mesh.axis_names)


def is_explicit(mesh: Mesh | AbstractMesh) -> bool:
  """Returns True if an axis is Explicit, the default kind of `jax.make_mesh`."""
  return AxisType.Explicit in mesh.axis_types


def explicit_mesh(tree: object) -> Mesh | None:
  """Returns the current mesh, or else the mesh of a pytree's arrays, if Explicit.

  The result is None if that mesh is Auto or if there is none.
  """
  context = jax.sharding.get_abstract_mesh()  # also valid in traced code
  if not context.empty:
    mesh = jax.sharding.get_mesh() if is_explicit(context) else None
    return mesh if isinstance(mesh, Mesh) else None
  for leaf in jax.tree.leaves(tree):
    if (mesh := _explicit_mesh_of(leaf)) is not None:
      return mesh
  return None


def _explicit_mesh_of(leaf: object) -> Mesh | None:
  mesh = of_sharding(leaf)
  return mesh if isinstance(mesh, Mesh) and is_explicit(mesh) else None


def sharding_of(leaf: object) -> Sharding | None:
  """Returns the sharding of an array or of a shape; None if it has none."""
  return getattr(leaf, "sharding", None)


def of_sharding(x: object) -> Any:
  """Returns the mesh of a sharding or of a leaf with a sharding; None: it has none."""
  return getattr(getattr(x, "sharding", x), "mesh", None)


def on_auto(tree: object) -> Any:
  """Converts arrays on an Explicit mesh to the same mesh with Auto axes.

  Other leaves are returned unchanged. Nothing is copied.
  """

  def one(leaf):
    mesh = _explicit_mesh_of(leaf)
    return leaf if mesh is None else onto(leaf, auto(mesh))

  return jax.tree.map(one, tree)


def onto(tree: object, mesh: Mesh) -> Any:
  """Converts arrays to a mesh that differs from theirs only in the kinds of its axes.

  Nothing is copied.
  """

  def one(leaf):
    if not isinstance(leaf, jax.Array) or not isinstance(leaf.sharding, NamedSharding):
      return leaf
    # device_put raises if the current mesh differs from the target.
    with jax.set_mesh(mesh):
      return jax.device_put(leaf, NamedSharding(mesh, leaf.sharding.spec))

  return jax.tree.map(one, tree)


def current_mesh() -> Mesh | None:
  """Returns the mesh of `jax.set_mesh` or `with mesh:`, with Auto axes; None: none.

  Only code outside `jax.jit` may call it. Traced code calls `context_mesh`.
  """
  mesh = jax.sharding.get_mesh()
  if isinstance(mesh, Mesh) and not mesh.empty:
    return auto(mesh)
  return _legacy_mesh()


def context_mesh() -> Mesh | AbstractMesh | None:
  """Returns the mesh of the code being traced; None: no mesh, or one device.

  Under `jax.set_mesh` the result is an AbstractMesh, which has only a shape.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    mesh = _legacy_mesh()
  return None if mesh is None or mesh.size == 1 else mesh


def context_platform() -> str:
  """Returns the platform of the code being traced: "cpu", "gpu" or "tpu".

  It is the platform of the context's mesh, which may belong to a topology that this
  machine does not have. Without a mesh it is JAX's default backend.
  """
  mesh = jax.sharding.get_abstract_mesh()
  device = None if mesh.empty else mesh.abstract_device
  if device is None:
    legacy = _legacy_mesh()
    device = None if legacy is None else legacy.devices.flat[0]
  platform = jax.default_backend() if device is None else device.platform
  return "gpu" if platform in ("cuda", "rocm") else platform


def _legacy_mesh() -> Mesh | None:
  """Returns the mesh of `with mesh:`, which JAX stores separately; None: none."""
  with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.interpreters import pxla

    legacy = pxla.thread_resources.env.physical_mesh
  return None if legacy.empty else auto(legacy)


def mesh_of(tree: object) -> Mesh | None:
  """Returns the mesh of a pytree's arrays, with Auto axes; None: one device.

  A mesh of one device is returned as well if it can only be compiled for.
  """
  for leaf in jax.tree.leaves(tree):
    mesh = of_sharding(leaf)
    if isinstance(mesh, Mesh) and (mesh.size > 1 or is_planned(mesh)):
      return auto(mesh)
    if mesh is not None and mesh.size > 1:  # of a traced array
      return None
  return None


@contextlib.contextmanager
def use_mesh(mesh: Mesh | None) -> Iterator[None]:
  """Applies `jax.set_mesh(mesh)` inside the block; None changes nothing."""
  if mesh is None:
    yield
  else:
    with jax.set_mesh(mesh):
      yield


@contextlib.contextmanager
def off_planned() -> Iterator[None]:
  """Leaves the current mesh inside the block if its devices cannot hold arrays."""
  mesh = current_mesh()
  if mesh is None or not is_planned(mesh):
    yield
  else:
    with jax.set_mesh(Mesh(np.empty((), object), ())):
      yield


def axes_size(mesh: Mesh | AbstractMesh, axes: Any) -> int:
  """Returns the number of shards of a PartitionSpec entry (a name, names, or None)."""
  if axes is None:
    return 1
  names = (axes,) if isinstance(axes, str) else axes
  return math.prod(mesh.shape[name] for name in names)


def fit_spec(
  spec: PartitionSpec | tuple[Any, ...],
  shape: tuple[int, ...],
  mesh: Mesh | AbstractMesh,
) -> PartitionSpec:
  """Returns `spec` without the axes that cannot split an array of this shape.

  Axes that the mesh lacks are dropped. If the axes of a dimension together do not
  divide its size, the last of them are dropped until they do.
  """
  out = []
  for size, entry in zip(shape, tuple(spec) + (None,) * (len(shape) - len(spec))):
    names = (entry,) if isinstance(entry, str) else tuple(entry or ())
    names = tuple(name for name in names if name in mesh.shape)
    while names and size % axes_size(mesh, names):
      names = names[:-1]
    out.append((names[0] if len(names) == 1 else names) if names else None)
  return PartitionSpec(*out)


def constrain(x: jax.Array, *spec: Any) -> jax.Array:
  """Pins `x` to a PartitionSpec on the context's mesh; without a mesh does nothing.

  Axes that the mesh lacks or that do not divide a dimension are dropped. Pinning is a
  hint about layout and never changes values.
  """
  mesh = context_mesh()
  if mesh is None:
    return x
  fitted = fit_spec(spec, x.shape, mesh)
  where = NamedSharding(mesh, fitted) if isinstance(mesh, Mesh) else fitted
  return jax.lax.with_sharding_constraint(x, where)


def put(x: Any, sharding: Sharding) -> Any:
  """Places an array with a sharding.

  The result is a ShapeDtypeStruct if `x` is one, or if the devices of the sharding
  belong to a topology that programs can only be compiled for.
  """
  mesh = of_sharding(sharding)
  if isinstance(x, jax.ShapeDtypeStruct) or (mesh is not None and is_planned(mesh)):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
  return jax.device_put(x, sharding)


def is_planned(mesh: Mesh) -> bool:
  """Returns True if the devices belong to a topology and cannot hold arrays.

  `jax.experimental.topologies` makes such devices, for compiling only.
  """
  device = mesh.devices.flat[0]
  return device.client.runtime_type == "compile_only_runtime"


def declared_spec(variable: Any) -> Any:
  """Returns the sharding that an nnx.Variable declares in `out_sharding`; None: none.

  If its names are logical axes, `nnx.logical_axis_rules` of the context or the
  variable's own `sharding_rules` map them to mesh axes.
  """
  spec = variable.get_metadata().get("out_sharding")
  if spec is None or isinstance(spec, NamedSharding):
    return spec
  from flax.nnx import spmd  # not above: commands that run no model do without flax

  return spmd.get_var_pspec(variable)


def sharding_of_spec(spec: Any, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
  """Returns a sharding on `mesh`, without axes that cannot split the array.

  Args:
    spec: axis names by dimension, a PartitionSpec, a NamedSharding, or None.
    shape: shape of the array.
    mesh: the mesh; see `fit_spec` for the axes that are dropped.
  """
  if isinstance(spec, NamedSharding):
    spec = spec.spec
  return NamedSharding(mesh, fit_spec(spec or (), shape, mesh))
