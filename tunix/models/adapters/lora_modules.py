"""Linear maps of a model and their adapters, for `lora` and the saver."""

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
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from tunix.models.transformer.dense import dropout
from tunix.models.transformer.dense.layers import Linear, column_norms, magnitude_ratio
from tunix.models.transformer.dense.quantized import QuantizedKernel
from tunix.models.transformer.model import Transformer
from tunix.utils import mesh as mesh_lib

# The modules of a model that reads images, and the linear maps of theirs that PEFT
# adapts too.
IMAGE_MODULES = ("vision_tower", "multi_modal_projector")
_OF_IMAGES = ("vision_tower.layers.", "multi_modal_projector.")

Shardings = tuple[NamedSharding | None, NamedSharding | None, NamedSharding | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
  """The adapter of one module; see `Linear`.

  Attributes:
    a, b: the factors [*stack, in, r] and [*stack, r, out].
    magnitude: DoRA's magnitudes [*stack, out], or None.
    scale: factor of A B.
    dropout: probability that an element of A's input is dropped.
    rslora: True if the scale is alpha / sqrt(r); recorded when saved.
  """

  a: jax.Array | np.ndarray
  b: jax.Array | np.ndarray
  magnitude: jax.Array | np.ndarray | None = None
  scale: float
  dropout: float = 0.0
  rslora: bool = False


class CastError(NamedTuple):
  """The error of rounding a merged kernel to its dtype.

  Attributes:
    module: path of the module.
    of_kernel: norm of the error divided by the norm of the merged kernel.
    of_update: norm of the error divided by the norm of the adapter's change of the
      kernel. Near 1 the change is lost; inf if the adapter changes nothing.
  """

  module: str
  of_kernel: float
  of_update: float


def hits(target: str, path: str) -> bool:
  """Returns True if a target selects a module.

  A target is the last parts of a module's path, or a regular expression for the path.
  Last parts select nothing in `IMAGE_MODULES`, so that "q_proj" does not mean the
  layers of a vision tower. The name of one of them selects all that is in it.
  """
  if (root := path.partition(".")[0]) in IMAGE_MODULES and target == root:
    return True
  ends = root not in IMAGE_MODULES and f".{path}".endswith(f".{target}")
  return ends or bool(re.fullmatch(target, path))


def select(
  model: Transformer, targets: Iterable[str], *, images: bool = False
) -> list[str]:
  """Returns the paths of the modules that the targets select, in the model's order.

  Args:
    model, images: see `adaptable`.
    targets: see `hits`.

  Raises:
    ValueError: a target matches no module that can be adapted; the message lists the
      modules.
  """
  paths = list(adaptable(model, images=images))
  chosen: set[str] = set()
  for target in targets:
    matched = [path for path in paths if hits(target, path)]
    if not matched:
      fixed = [p for p in (*linears(model), "embed_tokens") if hits(target, p)]
      why = f"{fixed[0]} cannot be adapted" if fixed else "it matches no module"
      raise ValueError(f"target {target!r}: {why}; modules are {', '.join(paths)}")
    chosen.update(matched)
  return [path for path in paths if path in chosen]


def linears(model: Transformer) -> dict[str, Linear]:
  """Returns the model's linear maps by dotted path."""
  return {
    ".".join(map(str, path)): module
    for path, module in nnx.iter_modules(model)
    if isinstance(module, Linear)
  }


def adaptable(model: Transformer, *, images: bool = False) -> dict[str, Linear]:
  """Returns the linear maps that can have an adapter: those of the layers.

  An adapter on the embedding or unembedding would not be trained: losses use the
  unembedding's kernel and not its call.

  Args:
    model: the model.
    images: include the layers of a vision tower, and its projector.
  """
  roots = ("layers.", *_OF_IMAGES) if images else "layers."
  modules = linears(model).items()
  return {p: m for p, m in modules if p.startswith(roots) and m.is_module}


def adapted(model: Transformer) -> dict[str, Linear]:
  """Returns the linear maps that have an adapter, by path."""
  return {p: m for p, m in linears(model).items() if m.lora_a is not None}


def pair_of(linear: Linear) -> tuple[jax.Array, jax.Array]:
  """Returns A and B of an adapted module."""
  assert linear.lora_a is not None and linear.lora_b is not None
  return linear.lora_a[...], linear.lora_b[...]


def magnitude_of(linear: Linear) -> jax.Array | None:
  """Returns the magnitudes of a module adapted with DoRA, else None."""
  return None if linear.lora_magnitude is None else linear.lora_magnitude[...]


def require_adapters(model: Transformer) -> None:
  """Refuses a model without adapters with a ValueError."""
  if not adapted(model):
    raise ValueError("the model has no adapters: call lora.apply first")


def require_bare(model: Transformer) -> None:
  """Refuses a model with adapters with a ValueError."""
  if adapted(model):
    raise ValueError(
      "the model has adapters already: merge them first, or adapt the base model"
    )


def is_quantized(linear: Linear) -> bool:
  """Returns True if the kernel is stored in 4 or 8 bits."""
  return isinstance(linear.kernel, QuantizedKernel)


def kernel_sharding(linear: Linear) -> NamedSharding | None:
  """Returns the sharding of the kernel at full size; None without a mesh."""
  kernel = linear.kernel
  if not isinstance(kernel, QuantizedKernel):
    where = kernel[...].sharding
    return where if isinstance(where, NamedSharding) else None
  mesh = mesh_lib.mesh_of(nnx.state(kernel))
  if mesh is None:
    return None
  spec = kernel.get_metadata("out_sharding")
  return mesh_lib.sharding_of_spec(spec, kernel.shape, mesh)


def dense_kernel(linear: Linear, dtype: DTypeLike) -> jax.Array:
  """Returns the kernel without its adapter as an array, sharded like the kernel."""
  compute = jax.jit(
    lambda w: w[...].astype(dtype), out_shardings=kernel_sharding(linear)
  )
  return compute(linear.kernel)


def merged_kernel(
  path: str, linear: Linear, dtype: DTypeLike
) -> tuple[jax.Array, CastError]:
  """Returns the kernel of an adapted module with its adapter added, and its error.

  The result is sharded like the kernel. The error is that of rounding to `dtype`.
  """
  where = kernel_sharding(linear)
  outs = None if where is None else (where, None, None)
  merged = jax.jit(_merged, static_argnums=(4, 5), out_shardings=outs)
  pair, magnitude = pair_of(linear), magnitude_of(linear)
  value, of_kernel, of_update = merged(
    dense_kernel(linear, jnp.float32) if is_quantized(linear) else linear.kernel[...],
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


def _specs(linear: Linear) -> tuple[tuple[Any, ...], ...]:
  """Returns the PartitionSpec entries of A, B and m.

  Each is sharded like the dimensions of the kernel that it touches; r is not sharded.
  """
  *stack, rows, columns = linear.stored.get_metadata()["out_sharding"]
  return (*stack, rows, None), (*stack, None, columns), (*stack, columns)


def adapter_shardings(linear: Linear, rank: int, mesh: Mesh | None) -> Shardings:
  """Returns the shardings of A, B and the magnitudes of a module; None without a mesh.

  Args:
    linear: the module.
    rank: r of its adapter.
    mesh: the mesh of the base model.
  """
  if mesh is None:
    return None, None, None
  *stack, rows, columns = linear.kernel.shape
  a, b, m = (
    mesh_lib.sharding_of_spec(spec, shape, mesh)
    for spec, shape in zip(
      _specs(linear), ((*stack, rows, rank), (*stack, rank, columns), (*stack, columns))
    )
  )
  return a, b, m


def placed(model: Transformer, adapters: dict[str, Adapter]) -> dict[str, Adapter]:
  """Copies adapters of host arrays to the devices of the base model."""
  mesh, modules, out = mesh_lib.mesh_of(nnx.state(model)), linears(model), {}
  for path, adapter in adapters.items():
    arrays = adapter.a, adapter.b, adapter.magnitude
    where = adapter_shardings(modules[path], adapter.a.shape[-1], mesh)
    a, b, magnitude = (
      None if x is None else jax.device_put(x, sharding)
      for x, sharding in zip(arrays, where)
    )
    out[path] = dataclasses.replace(adapter, a=a, b=b, magnitude=magnitude)
  return out


def fresh_magnitude(linear: Linear, where: NamedSharding | None) -> jax.Array:
  """Returns ||W|| of each output, the magnitude of a DoRA adapter before training.

  Args:
    linear: the module.
    where: sharding of the result.
  """

  def norms(kernel):
    return jnp.linalg.norm(kernel[...].astype(jnp.float32), axis=-2)

  return jax.jit(norms, out_shardings=where)(linear.kernel)


def attach(
  model: Transformer, adapters: dict[str, Adapter], key: jax.Array
) -> Transformer:
  """Returns a copy of the model with the adapters attached.

  Args:
    model: a model without adapters. It is unchanged, and its arrays are shared.
    adapters: the adapters by path of the module.
    key: random key of the dropout masks.
  """
  require_bare(model)
  out = nnx.clone(model)
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
      mesh = mesh_lib.mesh_of(nnx.state(linear.kernel) if is_quantized(linear) else a)
      if mesh is not None:
        value = state.get_value()
        where = mesh_lib.sharding_of_spec((), value.shape, mesh)
        state.set_value(jax.device_put(value, where))
      linear.lora_rng = nnx.data(state)
  return out


def detach(linear: Linear) -> None:
  """Removes a module's adapter, in place."""
  linear.lora_a, linear.lora_b = nnx.data(None), nnx.data(None)
  linear.lora_magnitude, linear.lora_rng = nnx.data(None), nnx.data(None)
  linear.lora_scale, linear.lora_dropout = 1.0, 0.0
  linear.lora_rslora = False


def count(model: Transformer) -> int:
  """Returns the number of parameters; a quantized kernel counts at its full size."""
  total = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
  for linear in linears(model).values():
    if is_quantized(linear):
      stored = jax.tree.leaves(nnx.state(linear.kernel))
      total += math.prod(linear.kernel.shape) - sum(leaf.size for leaf in stored)
  return total


def report_errors(
  errors: list[CastError],
  report: Callable[[CastError], None] | None,
  log: logging.Logger,
) -> None:
  """Passes rounding errors to `report`, or logs the largest one if it is None."""
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
