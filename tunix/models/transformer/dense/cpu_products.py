"""Products with matrices on a CPU, in the forms that XLA computes fastest there.

Float32, few rows: a matrix is read faster as [out, in], the left operand (`few_rows`).
A model that only decodes therefore holds its kernels transposed (`TransposedKernel`).
bfloat16: a product is fast if it has two rows or more and a float32 result (`einsum`).
With jax 0.12, only single rows and gradients are slow without this.

Wall and CPU time in ms on two cores (AMD EPYC with AVX512-BF16, jax 0.10.2) for the
matrices of 12 layers of SmolLM2-135M (512 rows: of 4 or 6 layers, times 3 or 2), and of
4 layers of Qwen3-0.6B (- : not measured):

rows                         1         8          32         512
SmolLM2   [in, out]          8.2/12.9  11.2/21.0  22.6/42.6  225/429
          [out, in]          8.1/11.5  10.6/19.1  20.3/37.5  270/529
          bfloat16           67/121    66/119     -          299/549
          by `einsum`        7.0/12.9  9.1/16.2   -          120/235
Qwen3     [in, out]          9.6/18.0  16.1/31.4  30.5/59.6  -
          [out, in]          8.0/15.2  11.8/20.5  23.4/45.3  -
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tunix.ops.vocabulary.invariant import LANES, MANY, rounded
from tunix.utils import mesh as mesh_lib

# With more rows, `few_rows` is not faster than the product with the matrix [in, out].
_FEW = 256


class TransposedKernel(nnx.Module):
  """The kernel of a `Linear` that only decodes, and only on a CPU.

  Attributes:
    matrix: [out, in].
  """

  def __init__(self, kernel: Float[Array, "I O"]):
    self.matrix = nnx.Param(kernel.T)

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the kernel, (in, out)."""
    return self.matrix.shape[::-1]

  def __getitem__(self, _: object) -> jax.Array:
    """Returns the kernel [in, out]; the index is ignored."""
    return self.matrix[...].T

  def product(
    self,
    x: Float[Array, "*B I"],
    product: Callable[[jax.Array, jax.Array], jax.Array],
    invariant: bool = False,
  ) -> Float[Array, "*B O"]:
    """Returns product(x, kernel); see `few_rows` for `invariant`."""
    is_wide = not invariant or self.matrix.shape[0] >= LANES
    if x.dtype == jnp.float32 and suits(x) and is_wide:
      return few_rows(x, self.matrix[...], invariant)
    return product(x, self[...].astype(x.dtype))


def suits(x: jax.Array) -> bool:
  """Returns True if `few_rows` is the faster product for these rows, here."""
  is_few = math.prod(x.shape[:-1]) <= _FEW
  is_single = x.dtype == jnp.float32 and mesh_lib.context_platform() == "cpu"
  return is_few and (is_single or _is_half(x))


def few_rows(
  x: Float[Array, "*B I"], matrix: Float[Array, "O I"], invariant: bool = False
) -> Float[Array, "*B O"]:
  """Returns x times the transposed matrix, in float32.

  With `invariant`, the bits of a row are those of `invariant_product`, if there are at
  least LANES outputs.
  """
  rows = doubled(x.reshape(-1, x.shape[-1]), invariant)
  how = {"preferred_element_type": jnp.float32}
  if invariant:
    # With the matrix as left operand, the order depends on the number of rows.
    out = jnp.einsum("ri,oi->ro", rows, matrix, **how)
  else:
    out = jnp.einsum("oi,ri->or", matrix, rows, **how)
    # Without the barrier, XLA swaps the operands and has no small result to transpose.
    out = jax.lax.optimization_barrier(out).T
  out = out[: math.prod(x.shape[:-1])]
  return out.reshape(*x.shape[:-1], matrix.shape[0])


def einsum(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """Returns jnp.einsum(spec, x, y).

  In bfloat16 on a CPU, without a mesh in context, the product and those of its gradient
  have float32 results, which are rounded once. Forward-mode differentiation is not
  supported there.

  Args:
    spec: two terms and the result, with each letter in two of them. `...` stands for
      axes of the first term and of the result.
    x, y: the operands.
  """
  is_alone = mesh_lib.context_mesh() is None
  if not (is_alone and x.dtype == y.dtype and x.ndim > 1 and _is_half(x)):
    return jnp.einsum(spec, x, y)
  axes = x.ndim - len(spec.partition(",")[0].replace("...", ""))
  spec = spec.replace("...", "STUVWXYZ"[:axes])
  rows = doubled(x) if axes else x  # without axes, the last but one is in `y` too
  return _rounded(spec, rows, y)[..., : x.shape[-2], :]


def invariant_product(
  x: Float[Array, "*B T I"], kernel: Float[Array, "I O"], dtype: DTypeLike | None = None
) -> Float[Array, "*B T O"]:
  """Returns x @ kernel; on a CPU, the bits of a row do not depend on other rows.

  Args:
    x, kernel: both float32, or both bfloat16; they are added in float32.
    dtype: dtype of the result; None for that of x.
  """
  (*lead, tokens, size), outs = x.shape, kernel.shape[1]
  mesh = mesh_lib.context_mesh()
  is_alone = mesh is None
  # A mesh may split the leading axes, which are therefore not joined with the tokens'.
  rows = x.reshape(-1, size) if is_alone or tokens == 1 else x
  least = MANY if x.dtype == jnp.float32 else 2
  if mesh is not None:
    least = MANY * mesh.size
  short = max(0, least - rows.shape[-2])
  rows = jnp.pad(rows, ((0, 0),) * (rows.ndim - 2) + ((0, short), (0, 0)))
  kernel = jnp.pad(kernel, ((0, 0), (0, max(0, LANES - outs))))
  if dtype is None and is_alone and _is_half(x):
    out = _rounded("si,io->so", rows, kernel)  # its gradient has float32 results too
  else:
    out = jnp.einsum("...i,io->...o", rows, kernel, preferred_element_type=jnp.float32)
  count = rows.shape[-2] - short
  out = out[..., :count, :outs].reshape(*lead, tokens, outs).astype(dtype or x.dtype)
  return rounded(out)


def doubled(x: Float[Array, "*B N I"], invariant: bool = False) -> jax.Array:
  """Returns x, or a single row twice.

  Two rows of bfloat16 take less time than one on a CPU. With `invariant`, the bits of a
  row must be those that it has among others, in any dtype.
  """
  is_single = math.prod(x.shape[:-1]) == 1
  is_needed = is_single and (invariant or _is_half(x))
  return jnp.concatenate([x, x], axis=-2) if is_needed else x


def take(table: Float[Array, "N D"], indices: Int[Array, "*B"]) -> Float[Array, "*B D"]:
  """Returns table[indices]; XLA would convert a whole table of bfloat16 on a CPU.

  With such a table, forward-mode differentiation is not supported.
  """
  if not _is_half(table) or mesh_lib.context_mesh() is not None:
    return table[indices]
  return _take(table, jnp.asarray(indices))


def _is_half(x: jax.Array) -> bool:
  return x.dtype == jnp.bfloat16 and mesh_lib.context_platform() == "cpu"


def _rounded_einsum(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
  out = jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)
  return out.astype(x.dtype)


_rounded = jax.custom_vjp(_rounded_einsum, nondiff_argnums=(0,))


def _forward(spec, x, y):
  return _rounded_einsum(spec, x, y), (x, y)


def _backward(spec, operands, gradient):
  (left, right), result = spec.split("->")[0].split(","), spec.split("->")[1]
  x, y = operands
  return (
    _rounded_einsum(f"{result},{right}->{left}", gradient, y),
    _rounded_einsum(f"{left},{result}->{right}", x, gradient),
  )


_rounded.defvjp(_forward, _backward)


@jax.custom_vjp
def _take(table, indices):
  bits = jax.lax.bitcast_convert_type(table, jnp.uint16)
  return jax.lax.bitcast_convert_type(bits[indices], table.dtype)


def _take_backward(operands, gradient):
  table, indices = operands
  added = jnp.zeros_like(table).at[indices].add(gradient)
  return added, np.zeros(indices.shape, jax.dtypes.float0)


_take.defvjp(
  lambda table, indices: (_take(table, indices), (table, indices)), _take_backward
)
