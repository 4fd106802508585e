"""The decoder's linear maps and their adapters: what `lora` and the saver share."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from tunix.models.transformer import dropout
from tunix.models.transformer.layers import Linear, column_norms, magnitude_ratio
from tunix.models.transformer.model import Transformer
from tunix.models.transformer.quantised import QuantisedKernel
from tunix.utils import mesh as mesh_lib

Pair = tuple[Any, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
  """What one module is adapted with; see `Linear`.

  Attributes:
    a, b: [*stack, in, r] and [*stack, r, out].
    magnitude: [*stack, out], or None without DoRA.
    scale: of A B.
    dropout: of A's input.
    rslora: whether the scale is alpha / sqrt(r), for the record.
  """

  a: Any
  b: Any
  magnitude: Any = None
  scale: float
  dropout: float = 0.0
  rslora: bool = False


class CastError(NamedTuple):
  """What a merged kernel lost when it was rounded to its dtype.

  Attributes:
    module: its path.
    of_kernel: norm of the rounding error over the norm of the merged kernel.
    of_update: the same over the norm of what the adapter changes; near 1 the update is
      lost, inf when there is none.
  """

  module: str
  of_kernel: float
  of_update: float


def hits(target: str, path: str) -> bool:
  """Whether a name or pattern stands for a module: the last parts of its path, or a
  regular expression for all of it."""
  return f".{path}".endswith(f".{target}") or bool(re.fullmatch(target, path))


def select(model: Transformer, targets: Iterable[str]) -> list[str]:
  """The modules that the targets name, in the model's order.

  Raises:
    ValueError: a target matches nothing that can be adapted; the message lists the
      modules.
  """
  paths = list(adaptable(model))
  chosen: set[str] = set()
  for target in targets:
    matched = [path for path in paths if hits(target, path)]
    if not matched:
      fixed = [p for p in ("lm_head", "embed_tokens") if hits(target, p)]
      why = f"{fixed[0]} cannot be adapted" if fixed else "it matches no module"
      raise ValueError(f"target {target!r}: {why}; modules are {', '.join(paths)}")
    chosen.update(matched)
  return [path for path in paths if path in chosen]


def linears(model: Transformer) -> dict[str, Linear]:
  """The model's linear maps by dotted module path."""
  return {
    ".".join(map(str, path)): module
    for path, module in nnx.iter_modules(model)
    if isinstance(module, Linear)
  }


def adaptable(model: Transformer) -> dict[str, Linear]:
  """Those that can carry an adapter: the layers'. The losses read the unembedding
  beside the layers, so an adapter on it or on the embedding would train nobody."""
  return {p: m for p, m in linears(model).items() if p.startswith("layers.")}


def adapted(model: Transformer) -> dict[str, Linear]:
  """Those linear maps that carry an adapter."""
  return {p: m for p, m in linears(model).items() if m.lora_a is not None}


def pair_of(linear: Linear) -> tuple[jax.Array, jax.Array]:
  """(A, B) of an adapted module."""
  assert linear.lora_a is not None and linear.lora_b is not None
  return linear.lora_a[...], linear.lora_b[...]


def magnitude_of(linear: Linear) -> jax.Array | None:
  """m of a module adapted with DoRA, else None."""
  return None if linear.lora_magnitude is None else linear.lora_magnitude[...]


def require_adapters(model: Transformer) -> None:
  """Raises ValueError for a model without adapters."""
  if not adapted(model):
    raise ValueError("the model has no adapters: call lora.apply first")


def require_bare(model: Transformer) -> None:
  """Raises ValueError for a model with adapters."""
  if adapted(model):
    raise ValueError(
      "the model has adapters already: merge them first, or adapt the base model"
    )


def is_quantised(linear: Linear) -> bool:
  """Whether the kernel is stored in 4 or 8 bits."""
  return isinstance(linear.kernel, QuantisedKernel)


def kernel_sharding(linear: Linear) -> NamedSharding | None:
  """Where the kernel lies, or would lie at full size; None without a mesh."""
  kernel = linear.kernel
  if not isinstance(kernel, QuantisedKernel):
    where = kernel[...].sharding
    return where if isinstance(where, NamedSharding) else None
  mesh = mesh_lib.mesh_of(nnx.state(kernel))
  if mesh is None:
    return None
  spec = kernel.get_metadata("out_sharding")
  return mesh_lib.sharding_of_spec(spec, kernel.shape, mesh)


def dense_kernel(linear: Linear, dtype: DTypeLike) -> jax.Array:
  """The kernel without its adapter, laid out like it."""
  compute = jax.jit(
    lambda w: w[...].astype(dtype), out_shardings=kernel_sharding(linear)
  )
  return compute(linear.kernel)


def merged_kernel(
  path: str, linear: Linear, dtype: DTypeLike
) -> tuple[jax.Array, CastError]:
  """The kernel of one adapted module with its adapter added, laid out like it, and
  what rounding it to `dtype` cost."""
  where = kernel_sharding(linear)
  outs = None if where is None else (where, None, None)
  merged = jax.jit(_merged, static_argnums=(4, 5), out_shardings=outs)
  pair, magnitude = pair_of(linear), magnitude_of(linear)
  value, of_kernel, of_update = merged(
    dense_kernel(linear, jnp.float32) if is_quantised(linear) else linear.kernel[...],
    *pair,
    magnitude,
    linear.lora_scale,
    jnp.dtype(dtype),
  )
  return value, CastError(path, float(of_kernel), float(of_update))


def _merged(kernel, a, b, magnitude, scale, dtype):
  kernel, a, b = (x.astype(jnp.float32) for x in (kernel, a, b))
  product = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
  exact = kernel + scale * product
  if magnitude is not None:
    norms = column_norms(kernel, a, b, scale)
    exact = exact * magnitude_ratio(magnitude, norms)[..., None, :]
  value = exact.astype(dtype)
  lost = jnp.linalg.norm((value.astype(jnp.float32) - exact).ravel())
  return (
    value,
    lost / jnp.linalg.norm(exact.ravel()),
    lost / jnp.linalg.norm((exact - kernel).ravel()),
  )


def copy(model: Transformer) -> Transformer:
  """New modules around the same arrays."""
  return nnx.clone(model)


def _specs(linear: Linear) -> tuple[tuple[Any, ...], ...]:
  """Axes of A, B and m: those of the kernel's dimension that each touches."""
  *stack, rows, columns = linear.kernel.get_metadata()["out_sharding"]
  return (*stack, rows, None), (*stack, None, columns), (*stack, columns)


def pair_shardings(
  model: Transformer, shapes: dict[str, Pair]
) -> dict[str, tuple[NamedSharding | None, NamedSharding | None]]:
  """Where (A, B) of each module lie: on the base's mesh, None without one."""
  mesh = mesh_lib.mesh_of(nnx.state(model))
  if mesh is None:
    return dict.fromkeys(shapes, (None, None))
  modules = linears(model)

  def place(spec: tuple[Any, ...], shape: tuple[int, ...]) -> NamedSharding:
    return NamedSharding(mesh, mesh_lib.fit_spec(spec, shape, mesh))

  where = {}
  for path, (shape_a, shape_b) in shapes.items():
    spec_a, spec_b, _ = _specs(modules[path])
    where[path] = place(spec_a, shape_a), place(spec_b, shape_b)
  return where


def placed(model: Transformer, adapters: dict[str, Adapter]) -> dict[str, Adapter]:
  """Adapters of host arrays, put where the base lies."""
  pairs = {path: (x.a, x.b) for path, x in adapters.items()}
  shapes = {path: (a.shape, b.shape) for path, (a, b) in pairs.items()}
  where = pair_shardings(model, shapes)
  modules = linears(model)
  out = {}
  for path, adapter in adapters.items():
    a, b = jax.device_put(pairs[path], where[path])
    magnitude = adapter.magnitude
    if magnitude is not None:
      place = _magnitude_sharding(modules[path])
      magnitude = jax.device_put(magnitude, place)
    out[path] = dataclasses.replace(adapter, a=a, b=b, magnitude=magnitude)
  return out


def _magnitude_sharding(linear: Linear) -> NamedSharding | None:
  """On the mesh like the outputs."""
  where = kernel_sharding(linear)
  if where is None:
    return None
  *stack, _, columns = linear.kernel.shape
  mesh = mesh_lib.mesh_of(nnx.state(linear)) or where.mesh
  assert isinstance(mesh, Mesh)
  return mesh_lib.sharding_of_spec(_specs(linear)[2], (*stack, columns), mesh)


def fresh_magnitude(linear: Linear) -> jax.Array:
  """||W|| of each output, so that a fresh DoRA adapter changes nothing; it lies on the
  mesh like the outputs."""

  def norms(kernel):
    return jnp.linalg.norm(kernel[...].astype(jnp.float32), axis=-2)

  return jax.jit(norms, out_shardings=_magnitude_sharding(linear))(linear.kernel)


def attach(
  model: Transformer, adapters: dict[str, Adapter], key: jax.Array
) -> Transformer:
  """A copy of the model whose modules carry the adapters; `key` seeds their dropout."""
  require_bare(model)
  out = copy(model)
  modules = linears(out)
  for path, adapter in adapters.items():
    linear = modules[path]
    a, b, magnitude = (
      None
      if value is None
      else nnx.LoRAParam(value, out_sharding=spec, eager_sharding=False)
      for value, spec in zip((adapter.a, adapter.b, adapter.magnitude), _specs(linear))
    )
    linear.lora_a, linear.lora_b = nnx.data(a), nnx.data(b)
    linear.lora_magnitude = nnx.data(magnitude)
    linear.lora_scale, linear.lora_rslora = adapter.scale, adapter.rslora
    linear.lora_dropout = adapter.dropout
    if adapter.dropout:
      path_key = jax.random.fold_in(key, zlib.crc32(path.encode()))
      state = dropout.new_state(path_key, linear.kernel.shape[:-2])
      mesh = mesh_lib.mesh_of(nnx.state(linear.kernel) if is_quantised(linear) else a)
      if mesh is not None:
        value = state.get_value()
        where = mesh_lib.sharding_of_spec((), value.shape, mesh)
        state.set_value(jax.device_put(value, where))
      linear.lora_rng = nnx.data(state)
  return out


def detach(linear: Linear) -> None:
  """Takes a module's adapter away."""
  linear.lora_a, linear.lora_b = nnx.data(None), nnx.data(None)
  linear.lora_magnitude, linear.lora_rng = nnx.data(None), nnx.data(None)
  linear.lora_scale, linear.lora_dropout = 1.0, 0.0
  linear.lora_rslora = False


def count(model: Transformer) -> int:
  """Parameters of the model; a quantised kernel counts as its numbers, not bytes."""
  total = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
  for linear in linears(model).values():
    if is_quantised(linear):
      stored = jax.tree.leaves(nnx.state(linear.kernel))
      total += math.prod(linear.kernel.shape) - sum(leaf.size for leaf in stored)
  return total


def tell(
  errors: list[CastError],
  report: Callable[[CastError], None] | None,
  log: logging.Logger,
) -> None:
  """Hands errors to `report`, or logs the worst."""
  if report is not None:
    for error in errors:
      report(error)
  elif errors:
    worst = max(errors, key=lambda error: error.of_kernel)
    log.info(
      "merged %d adapters; rounding lost at most %.1e of a kernel (%s, %.1e of its "
      "update)",
      *(len(errors), worst.of_kernel, worst.module, worst.of_update),
    )
