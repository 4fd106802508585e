"""The decoder's linear maps and their adapters: what `lora` and the saver share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from tunix.models.transformer.layers import Linear
from tunix.models.transformer.model import Transformer
from tunix.utils import mesh as mesh_lib

Pair = tuple[Any, Any]


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


def merged_kernel(linear: Linear, dtype: DTypeLike) -> jax.Array:
  """The kernel of one adapted module with its adapter added, laid out like it."""
  kernel = linear.kernel[...]
  where = kernel.sharding if isinstance(kernel.sharding, NamedSharding) else None
  merged = jax.jit(_merged, static_argnums=(3, 4), out_shardings=where)
  return merged(kernel, *pair_of(linear), linear.lora_scale, jnp.dtype(dtype))


def _merged(kernel, a, b, scale, dtype):
  product = jnp.matmul(
    a.astype(jnp.float32), b.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
  )
  return (kernel.astype(jnp.float32) + scale * product).astype(dtype)


def copy(model: Transformer) -> Transformer:
  """New modules around the same arrays."""
  return nnx.clone(model)


def _specs(linear: Linear) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
  """Axes of A and B: those of the kernel's dimension that each touches."""
  *stack, rows, columns = linear.kernel.get_metadata()["out_sharding"]
  return (*stack, rows, None), (*stack, None, columns)


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
    spec_a, spec_b = _specs(modules[path])
    where[path] = place(spec_a, shape_a), place(spec_b, shape_b)
  return where


def attach(
  model: Transformer,
  pairs: dict[str, Pair],
  scale: float,
) -> Transformer:
  """A copy of the model whose modules carry the adapters."""
  require_bare(model)
  out = copy(model)
  modules = linears(out)
  for path, pair in pairs.items():
    a, b = (
      nnx.LoRAParam(value, out_sharding=spec, eager_sharding=False)
      for value, spec in zip(pair, _specs(modules[path]))
    )
    modules[path].lora_a, modules[path].lora_b = a, b
    modules[path].lora_scale = scale
  return out
