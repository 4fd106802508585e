"""Products of few rows with matrices, on a CPU.

XLA's CPU backend cuts a matrix [in, out] into tiles before each product. With few rows,
this takes longer than the product. A `TiledKernel` is cut once: with 8 rows, a matrix
of 512 x 1536 numbers takes 0.21 CPU ms instead of 0.47, and one of 1536 x 512 takes
0.21 ms instead of 0.57 (jax 0.10.2). A matrix [out, in] needs no tiles if it is the
left operand (`few_rows`), which takes 0.45 and 0.33 ms.

jax 0.10 multiplies tiles on one core and whole matrices on all. The layers of a model
of width 512 take on two cores, with tiles and without, in ms of wall time:

rows        4           8           16          24          40          64
jax 0.10.2  1.9 / 2.5   3.0 / 3.1   5.1 / 4.0   7.1 / 5.0   11.2 / 6.8  17.7 / 10.4
jax 0.12.0  1.7 / 2.4   2.2 / 2.9   3.7 / 4.1   5.8 / 6.0   9.1 / 7.9   14.0 / 12.1
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from tunix.utils import mesh as mesh_lib

# Columns of a tile, the fastest first; 32 columns take 3 to 14 % longer than 64.
_TILES = (64, 32)

# Most rows for which tiles take less wall time. They take less CPU time up to 64 rows.
TILED_ROWS = 24 if jax.__version_info__ >= (0, 12) else 8

# With more rows, `few_rows` is not faster than a product with the matrix [in, out].
_FEW = 64


class TiledKernel(nnx.Module):
  """The kernel of a `Linear` that only decodes, and only on a CPU.

  Attributes:
    tiles: [out / tile, in, tile].
    number: number of the kernel among those that multiply the same rows.
  """

  def __init__(self, kernel: Float[Array, "I O"], number: int):
    inputs, outputs = kernel.shape
    tile = next(tile for tile in _TILES if outputs % tile == 0)
    tiles = kernel.reshape(inputs, outputs // tile, tile).swapaxes(0, 1)
    self.tiles = nnx.Param(tiles)
    self.number = number

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the kernel, (in, out)."""
    count, inputs, columns = self.tiles.shape
    return inputs, count * columns

  def __getitem__(self, _: object) -> jax.Array:
    """Returns the kernel [in, out]; the index is ignored."""
    return self.tiles[...].swapaxes(0, 1).reshape(self.shape)

  def product(
    self, x: Float[Array, "*B I"], product: Callable[[jax.Array, jax.Array], jax.Array]
  ) -> Float[Array, "*B O"]:
    """Returns product(x, kernel)."""
    if x.dtype != jnp.float32 or mesh_lib.context_platform() != "cpu":
      return product(x, self[...].astype(x.dtype))
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    # XLA does not see a product in the sum over a single row.
    rows = jnp.concatenate([rows, rows]) if count == 1 else rows
    # Two sums over the same rows would share a copy of the rows for each column of a
    # matrix, 100 times the work. A bound of its own, which no number is below, keeps
    # each product apart.
    rows = jnp.maximum(rows, -1e38 * (1 + self.number / 64))
    out = jnp.sum(rows[None, :, :, None] * self.tiles[...][:, None], axis=2)
    return (
      out.swapaxes(0, 1).reshape(-1, self.shape[1])[:count].reshape(*x.shape[:-1], -1)
    )


def can_tile(kernel: jax.Array) -> bool:
  """Returns True if a `TiledKernel` can hold the kernel."""
  is_matrix = kernel.ndim == 2 and kernel.dtype == jnp.float32
  return is_matrix and any(kernel.shape[1] % tile == 0 for tile in _TILES)


def suits(x: jax.Array) -> bool:
  """Returns True if `few_rows` is the faster product for these rows, here."""
  is_single = x.dtype == jnp.float32
  is_few = math.prod(x.shape[:-1]) <= _FEW
  return is_single and is_few and mesh_lib.context_platform() == "cpu"


def few_rows(
  x: Float[Array, "*B I"], matrix: Float[Array, "O I"]
) -> Float[Array, "*B O"]:
  """Returns x times the transposed matrix."""
  out = jnp.einsum("oi,ri->or", matrix, x.reshape(-1, x.shape[-1]))
  # Without the barrier, XLA swaps the operands and has no small result to transpose.
  return jax.lax.optimization_barrier(out).T.reshape(*x.shape[:-1], -1)
