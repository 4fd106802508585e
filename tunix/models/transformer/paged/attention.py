"""A key-value cache of pages for one layer, and attention over it.

A page holds the keys and values of `page_tokens` consecutive tokens of a sequence, and
a table lists the pages of every sequence. Page 0 belongs to no sequence and is never
written: it stands for pages that a table does not have. The layout of the pages depends
on the implementation of attention, which is therefore chosen when the cache is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tunix.models.transformer.paged import kernels as paged_kernels
from tunix.models.transformer.paged.rows import Ragged
from tunix.perf import programs
from tunix.utils import attributes, mesh as mesh_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
  """The features of attention in one layer.

  Attributes:
    platform: platform that the program runs on.
    dtype: dtype of queries, keys and values.
    head_dim: H.
    page_tokens: number of tokens of a page.
    softcap, window, sinks: True if the layer has a soft cap, a window, or sinks.
  """

  platform: str
  dtype: str
  head_dim: int
  page_tokens: int
  softcap: bool = False
  window: bool = False
  sinks: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Path:
  """An implementation of attention over pages.

  Attributes:
    run: called with (query, pages, ragged, scale, softcap, window), and with `sinks=`
      if the layer has them, on the heads of one device, returns the output; see
      `paged_kernels.gather`.
    is_joint: layout of the pages. False: keys and values are two arrays
      [K, P, page, H]. True: they are in the layout of `paged_kernels.tpu`.
    lacks: names of `Call`'s features that it does not support.
    platforms: platforms that it runs on; None for all.
    dtypes: supported dtypes of queries, keys and values; None for all.
    head_dims: supported head dimensions; None for all.
    head_most: largest head dimension of a dtype.
    page_sizes: supported numbers of tokens of a page; None for all.
  """

  run: Callable[..., jax.Array]
  is_joint: bool = False
  lacks: tuple[str, ...] = ()
  platforms: tuple[str, ...] | None = None
  dtypes: tuple[str, ...] | None = None
  head_dims: tuple[int, ...] | None = None
  head_most: Mapping[str, int] = dataclasses.field(default_factory=dict)
  page_sizes: tuple[int, ...] | None = None

  def refusals(self, call: Call) -> list[str]:
    """Returns the unsupported features of a call; empty if the path can run it."""
    lacks = attributes.of(call, self.lacks)
    out = [_FEATURES[name] for name, is_used in lacks.items() if is_used]
    listed = {
      "platform": self.platforms,
      "dtype": self.dtypes,
      "head_dim": self.head_dims,
      "page_tokens": self.page_sizes,
    }
    for name, value in attributes.of(call, listed).items():
      allowed = listed[name]
      if allowed is not None and value not in allowed:
        out.append(f"{name} {value} (it takes {', '.join(map(str, allowed))})")
    most = self.head_most.get(call.dtype)
    if most is not None and call.head_dim > most:
      out.append(f"head_dim {call.head_dim} of {call.dtype} (at most {most})")
    return out


_FEATURES = {
  "softcap": "a soft cap",
  "window": "a window",
  "sinks": "attention sinks",
}


PATHS = {
  "gather": Path(run=paged_kernels.gather),
  "ragged": Path(
    run=paged_kernels.tpu,
    is_joint=True,
    # The kernel returns no log-sum-exp that a sink could be added to.
    lacks=("sinks",),
    platforms=("tpu",),
    dtypes=("bfloat16", "float32"),
    head_most={"float32": 128},
  ),
  "gpu_paged": Path(
    run=paged_kernels.gpu,
    lacks=("window", "sinks"),
    platforms=("gpu",),
    dtypes=("bfloat16", "float16"),
    # The kernel's blocks must have sizes that are powers of two.
    head_dims=(16, 32, 64, 128, 256),
    page_sizes=(1, 2, 4, 8, 16, 32, 64, 128),
  ),
}


def choose(call: Call, implementation: str = "auto") -> str:
  """Returns the name of the path for a call.

  Args:
    call: the features of the call.
    implementation: "auto", or the name of a path.

  Raises:
    ValueError: the name is unknown, or the named path does not support the call.
  """
  if implementation == "auto":
    fitting = (n for n in ("ragged", "gpu_paged") if not PATHS[n].refusals(call))
    return next(fitting, "gather")
  if implementation not in PATHS:
    raise ValueError(
      f"paged attention {implementation!r} is unknown: use 'auto' or one of "
      f"{sorted(PATHS)}"
    )
  refusals = PATHS[implementation].refusals(call)
  if refusals:
    able = [name for name, path in PATHS.items() if not path.refusals(call)]
    raise ValueError(
      f"paged attention {implementation!r} cannot do {'; '.join(refusals)}: use 'auto' "
      f"or one of {able}"
    )
  return implementation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedLayer:
  """The pages of one layer.

  Attributes:
    pages: arrays in the layout of the path (see `Path.is_joint`).
    path: name in `PATHS`.
    head_axes: mesh axes that split the key heads, for example ("tp",), or
      ("tp", "fsdp"). Axes at the end that do not divide them are dropped.
  """

  pages: tuple[Any, ...]
  path: str = dataclasses.field(metadata={"static": True})
  head_axes: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})

  @property
  def page_tokens(self) -> int:
    """Number of tokens of a page."""
    return self.pages[0].shape[1 if PATHS[self.path].is_joint else 2]

  @property
  def kv_heads(self) -> int:
    """Number of key heads K of all devices."""
    if PATHS[self.path].is_joint:
      return sum(x.shape[2] for x in self.pages) // 2
    return self.pages[0].shape[0]


def empty(
  *,
  pages: int,
  page_tokens: int,
  kv_heads: int,
  head_dim: int,
  dtype: DTypeLike,
  path: str = "gather",
  head_axes: tuple[str, ...] = (),
  mesh: Mesh | None = None,
) -> PagedLayer:
  """Returns a layer whose pages are zero.

  Args:
    pages: number of pages P, page 0 included.
    page_tokens: number of tokens of a page.
    kv_heads: number of key heads K of all devices.
    head_dim: size H of a head.
    dtype: dtype of keys and values.
    path: name in `PATHS`, from `choose`.
    head_axes: see `PagedLayer`.
    mesh: mesh of the pages; None for one device. If the devices of the mesh can only
      be compiled for, or inside `programs.recording`, the pages are
      `ShapeDtypeStruct`s.
  """
  entry = None if mesh is None else _head_entry(kv_heads, head_axes, mesh)
  if PATHS[path].is_joint:
    local = kv_heads if mesh is None else kv_heads // mesh_lib.axes_size(mesh, entry)
    arrays, head_dim = paged_kernels.joint_layout(local, head_dim, dtype)
    shape = (pages, page_tokens, 2 * kv_heads // arrays, head_dim)
  else:
    arrays, shape = 2, (kv_heads, pages, page_tokens, head_dim)
  if mesh is None and programs.is_recording():
    zeros = [jax.ShapeDtypeStruct(shape, dtype) for _ in range(arrays)]
  elif mesh is None:
    zeros = [jnp.zeros(shape, dtype) for _ in range(arrays)]
  else:
    where = NamedSharding(mesh, _page_spec(path, entry))
    if mesh_lib.is_planned(mesh) or programs.is_recording():

      def make():
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)
    else:
      make = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=where)
    zeros = [make() for _ in range(arrays)]
  return PagedLayer(pages=tuple(zeros), path=path, head_axes=head_axes)


def write(
  layer: PagedLayer,
  key: Float[Array, "T 1 K H"],
  value: Float[Array, "T 1 K H"],
  ragged: Ragged,
) -> PagedLayer:
  """Returns the layer with the keys and values of a round's valid tokens.

  If the layer is donated, or carried by a loop, the pages are changed in place.
  """

  def rows(key, value, pages, ragged):
    page, slot = ragged.places(layer.page_tokens)
    if is_joint:
      return paged_kernels.write_joint(key, value, pages, page, slot)
    return paged_kernels.write_split(key, value, pages, page, slot)

  is_joint = PATHS[layer.path].is_joint
  heads, split, whole = _specs(layer)
  specs = (heads, heads, (split,) * len(layer.pages), whole)
  run = _per_shard(rows, specs, specs[2])
  pages = run(key[:, 0], value[:, 0], layer.pages, ragged)
  return dataclasses.replace(layer, pages=pages)


def attend(
  query: Float[Array, "T 1 N H"],
  layer: PagedLayer,
  ragged: Ragged,
  *,
  scale: float | None = None,
  softcap: float | None = None,
  window: int | None = None,
  sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "T 1 N H"]:
  """Returns attention of a round's tokens to their sequences.

  The keys and values of the round must have been written. A token attends to itself and
  the tokens before it. The outputs of padding are 0.

  Args:
    query: queries in the order of `ragged`.
    layer: the pages.
    ragged: the rows.
    scale, softcap, window, sinks: see `attention_paths.attend`.

  Raises:
    ValueError: the path of the layer does not support the call.
  """
  dtype, stored = str(query.dtype), str(layer.pages[0].dtype)
  call = Call(
    platform=mesh_lib.context_platform(),
    dtype=dtype if dtype == stored else f"{dtype} over pages of {stored}",
    head_dim=query.shape[3],
    page_tokens=layer.page_tokens,
    softcap=softcap is not None,
    window=window is not None,
    sinks=sinks is not None,
  )
  path = PATHS[choose(call, layer.path)]
  scale = query.shape[3] ** -0.5 if scale is None else scale
  options = {"scale": scale, "softcap": softcap, "window": window}

  def run(query, pages, ragged, sinks):
    extra = {} if sinks is None else {"sinks": sinks}
    return path.run(query, pages, ragged, **options, **extra)

  heads, split, whole = _specs(layer)
  specs = (heads, (split,) * len(layer.pages), whole, PartitionSpec(heads[1]))
  out = _per_shard(run, specs, heads)(query[:, 0], layer.pages, ragged, sinks)
  return jnp.where(ragged.is_valid[:, None, None], out, 0)[:, None]


def _per_shard(run: Callable[..., Any], specs: object, out_specs: object) -> Any:
  """Returns a function that runs on the heads of each device.

  XLA's partitioner cannot split a kernel and would all-gather its operands.
  """
  mesh = mesh_lib.context_mesh()
  if mesh is None:
    return run
  return jax.shard_map(
    run, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False
  )


def _specs(layer: PagedLayer) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
  """Returns the specs of [T, heads, H], of pages, and of what every device has."""
  mesh = mesh_lib.context_mesh()
  entry = None if mesh is None else _head_entry(layer.kv_heads, layer.head_axes, mesh)
  heads = PartitionSpec(None, entry, None)
  return heads, _page_spec(layer.path, entry), PartitionSpec()


def _page_spec(path: str, entry: object) -> PartitionSpec:
  if PATHS[path].is_joint:
    return PartitionSpec(None, None, entry, None)
  return PartitionSpec(entry, None, None, None)


def _head_entry(kv_heads: int, axes: tuple[str, ...], mesh: Mesh | AbstractMesh) -> Any:
  """Returns the PartitionSpec entry of the key heads."""
  return mesh_lib.fit_spec((axes,), (kv_heads,), mesh)[0]
