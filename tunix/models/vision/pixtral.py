"""Pixtral's encoder (Agrawal et al. 2024, arXiv:2410.07073) of images of any size.

It has RMS norms, a gated MLP, no biases and rotary embedding in two dimensions. The
patches of all images of a row lie one after the other; a patch attends to the patches
of its own image. Shapes do not depend on the sizes of the images: rows are padded.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tunix.models.transformer.attention import rope
from tunix.models.transformer.config import Activation, RopeConfig
from tunix.models.transformer.dense.layers import ACTIVATIONS, FrozenParam
from tunix.models.transformer.dense.mlp import GatedMLP
from tunix.models.transformer.layer_maker import LayerMaker
from tunix.models.transformer.shards import sharding
from tunix.models.vision.config import CHANNELS, TowerConfig
from tunix.models.vision.layers import (
  PatchEmbedding,
  VisionAttention,
  VisionLayer,
  check_dtype,
  retype,
  run_layers,
)
from tunix.utils import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class PixtralConfig(TowerConfig):
  """`TowerConfig` of images of any size.

  Attributes:
    activation: activation function of the gated MLP.
    rope_theta: base of the rotary frequencies.
    image_size: longest edge in pixels that images are resized to before the tower.
  """

  norm_eps: float = 1e-5
  activation: Activation = "gelu"
  rope_theta: float = 10_000.0
  image_size: int = 1540

  def __post_init__(self):
    super().__post_init__()
    checks.fields(self, rope_theta=checks.POSITIVE, image_size=checks.COUNT)
    check_heads(self)


def check_heads(config: TowerConfig) -> None:
  """Refuses heads that cannot be rotated in two dimensions."""
  size = config.embed_dim // config.num_heads
  if size % 4:
    raise ValueError(
      f"embed_dim {config.embed_dim} / num_heads {config.num_heads} is {size}, "
      "expected a multiple of 4: half of a head is rotated by the row, and half by the "
      "column"
    )


def check_patches(
  values: jax.Array, grid: jax.Array, edge: int, numbers: int = 2
) -> None:
  """Refuses patches that a tower cannot read.

  Args:
    values, grid: see `PixtralTower.__call__`.
    edge: edge of a patch in pixels.
    numbers: count of the numbers of a grid, of which rows and columns are the last.

  Raises:
    TypeError, ValueError: see `PixtralTower.__call__`.
  """
  check_dtype(values)
  if values.ndim != 3 or values.shape[-1] != edge**2 * CHANNELS:
    raise ValueError(
      f"values have shape {values.shape}, expected [..., patches, "
      f"{edge**2 * CHANNELS}]: cut the images into patches of {edge} x {edge} pixels"
    )
  if grid.ndim != 3 or (len(grid), grid.shape[-1]) != (len(values), numbers):
    raise ValueError(
      f"grid has shape {grid.shape}, expected [{len(values)}, images, {numbers}]: give "
      f"{'1, ' * (numbers - 2)}rows and columns of each image, and both values and "
      "grid by row, or neither"
    )
  if not jnp.issubdtype(grid.dtype, jnp.integer):
    raise TypeError(f"grid is {grid.dtype}, expected integers: count the patches")


class Places(NamedTuple):
  """The images of patches, and their places in them.

  Attributes:
    owner: number of each patch's image; padding has the number of images.
    row, column: place in the image, from the upper left.
  """

  owner: Int[Array, "n P"]
  row: Int[Array, "n P"]
  column: Int[Array, "n P"]


def places(grid: Int[Array, "n N 2"], count: int) -> Places:
  """Returns the places of patches that lie image by image and row by row.

  Args:
    grid: rows and columns of the images; (0, 0) for a missing one.
    count: number of patches P of a row, padding included.
  """
  ends = jnp.cumsum(grid[..., 0] * grid[..., 1], axis=-1)
  index = jnp.arange(count, dtype=jnp.int32)
  owner = jnp.sum(index[:, None] >= ends[:, None], axis=-1, dtype=jnp.int32)
  known = jnp.minimum(owner, grid.shape[1] - 1)
  starts = jnp.pad(ends, ((0, 0), (1, 0)))[:, :-1]
  within = index - jnp.take_along_axis(starts, known, axis=1)
  width = jnp.maximum(jnp.take_along_axis(grid[..., 1], known, axis=1), 1)
  return Places(owner, within // width, within % width)


def squares(
  grid: Int[Array, "n N 2"], count: int, edge: int
) -> tuple[Int[Array, "n K q"], Bool[Array, "n K"]]:
  """Returns the patches of each square of edge x edge patches.

  Args:
    grid: rows and columns of the images in patches, multiples of `edge`.
    count: number of patches P of a row, padding included.
    edge: number of patches along a square.

  Returns:
    The indices of the patches, row by row, of the squares of all images in order; and
    False for squares of padding. K = P / edge^2. All are False if an image does not
    consist of whole squares, or if the images have more than P patches.
  """
  coarse = grid // edge
  at = places(coarse, count // edge**2)
  starts = jnp.cumsum(jnp.prod(grid, axis=-1), axis=-1) - jnp.prod(grid, axis=-1)
  known = jnp.minimum(at.owner, grid.shape[1] - 1)
  start = jnp.take_along_axis(starts, known, axis=1)
  width = jnp.take_along_axis(grid[..., 1], known, axis=1)
  down, right = jnp.divmod(jnp.arange(edge**2, dtype=jnp.int32), edge)
  rows, columns = at.row[..., None] * edge + down, at.column[..., None] * edge + right
  index = start[..., None] + rows * width[..., None] + columns
  whole = jnp.all((grid % edge == 0) & (grid >= 0), axis=(1, 2))
  whole &= jnp.sum(jnp.prod(grid, axis=-1), axis=-1) <= count
  valid = (at.owner < grid.shape[1]) & whole[:, None]
  return jnp.clip(index, 0, count - 1), valid


def angles(at: Places, head_dim: int, theta: float, odd: int = 1) -> rope.Angles:
  """Returns the rotary angles of patches.

  The frequencies theta^(-2i/H) with even i belong to the row, those with odd i to the
  column. The rows' angles come first. If `odd` is 0, the column has the even ones, too.
  """
  waves = rope.frequencies(head_dim, RopeConfig(theta=theta))
  parts = at.row[..., None] * waves[0::2], at.column[..., None] * waves[odd::2]
  angle = jnp.concatenate(parts, axis=-1)[:, :, None]
  return rope.Angles(jnp.sin(angle), jnp.cos(angle))


def _layers(c: PixtralConfig, rngs: nnx.Rngs) -> VisionLayer:
  """Makes the stack of layers."""
  d, f = c.embed_dim, c.hidden_dim
  make = LayerMaker(c.sharding, c.param_dtype, rngs, (c.num_layers,))
  attn = VisionAttention(make, d, num_heads=c.num_heads, bias=False)
  mlp = GatedMLP(
    make.linear(d, f, "in_out"),
    make.linear(d, f, "in_out"),
    make.linear(f, d, "out_in"),
    ACTIVATIONS[c.activation],
  )
  norms = make.norm(d, c.norm_eps), make.norm(d, c.norm_eps)
  return VisionLayer(norms[0], attn, norms[1], mlp, c.sharding)


class PixtralTower(nnx.Module):
  """Encoder of images, which returns one vector per patch.

  Attributes:
    config: shape and options.
    patch_embedding, ln_pre, layers: the modules; `layers` is one module of stacked
      weights [L, ...].
  """

  def __init__(self, config: PixtralConfig, *, rngs: nnx.Rngs):
    c = self.config = config
    self.patch_embedding = PatchEmbedding(c, rngs, bias=False)
    make = LayerMaker(c.sharding, c.param_dtype, rngs)
    self.ln_pre = make.norm(c.embed_dim, c.norm_eps)
    self.layers = _layers(c, rngs)
    retype(self, FrozenParam)

  def __call__(
    self, values: Float[Array, "n P d"], grid: Int[Array, "n N 2"]
  ) -> Float[Array, "n P Dv"]:
    """Encodes images.

    Args:
      values: the pixels of the patches, rows of an image one after the other and image
        after image; d counts rows, columns and channels of a patch in this order.
      grid: rows and columns of the images in patches; (0, 0) for a missing one.

    Returns:
      Vectors of the patches in the compute dtype; those of padding mean nothing.

    Raises:
      TypeError: the pixels are not float, or the grid is not of integers.
      ValueError: a patch has another size, or the grid has another shape.
    """
    c = self.config
    edge = c.patch_size
    check_patches(values, grid, edge)
    with jax.named_scope("patches"):
      x = jnp.asarray(values, c.dtype).reshape(*values.shape[:2], edge, edge, CHANNELS)
      x = self.ln_pre(self.patch_embedding.embed(x))
      x = sharding.pin_activations(x, c.sharding)
    at = places(grid, values.shape[1])
    turned = angles(at, c.embed_dim // c.num_heads, c.rope_theta)
    return run_layers(self.layers, x, c, turned, at.owner)
