"""The tower of Qwen3-VL and Qwen3.5 (Bai et al. 2025, arXiv:2511.21631), and its use.

It has layer norms, biases, learned positions that are interpolated to the grid of an
image, and rotary embedding in two dimensions. The patches of an image lie in squares of
m x m patches, one square for each soft token. As in `pixtral`, the patches of all
images of a row lie one after the other, and rows are padded.

The rotary positions of the decoder have the axes time, height and width (Wang et al.
2024, arXiv:2409.12191). All three of a text token are equal. Those of an image begin
after the text before it, and the text after it continues from their maximum.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tunix.models.transformer.dense.layers import ACTIVATIONS, FrozenParam
from tunix.models.transformer.layer_maker import LayerMaker
from tunix.models.transformer.shards import sharding
from tunix.models.vision import pixtral, siglip
from tunix.models.vision.config import (
  CHANNELS,
  TowerConfig,
  VisionLanguageConfig,
  in_model,
)
from tunix.models.vision.layers import PatchEmbedding, retype, run_and_keep
from tunix.models.vision.model import PatchesModel
from tunix.models.vision.pixtral import Places
from tunix.ops import masks
from tunix.utils import checks

FRAMES = 2  # of a patch; an image is both of them


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenConfig(TowerConfig):
  """`TowerConfig` of images of any size.

  Attributes:
    merge: edge m of the square of patches that makes one soft token.
    table_size: number of learned positions along an edge of their table.
    rope_theta: base of the rotary frequencies.
    deepstack: numbers of the layers whose outputs are added to the decoder's first
      layers, in increasing order; () in Qwen3.5.
  """

  merge: int = 2
  table_size: int = 48
  rope_theta: float = 10_000.0
  deepstack: tuple[int, ...] = ()

  def __post_init__(self):
    super().__post_init__()
    checks.fields(
      self,
      merge=checks.COUNT,
      table_size=checks.COUNT,
      rope_theta=checks.POSITIVE,
      deepstack=checks.NOT_NEGATIVE,
    )
    pixtral.check_heads(self)
    numbers = [i for i in range(self.num_layers) if i in self.deepstack]
    if list(self.deepstack) != numbers:
      raise ValueError(
        f"deepstack is {self.deepstack}; expected numbers of the {self.num_layers} "
        "layers in increasing order"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenImagesConfig(VisionLanguageConfig):
  """`VisionLanguageConfig` with this tower; the defaults are those of Qwen3.5.

  Attributes:
    vision: see `VisionLanguageConfig`.
    image_token_id: id of the soft tokens, <|image_pad|>.
    mrope_sections: numbers of rotated pairs that turn with time, height and width. The
      pairs 1, 4, 7, ... turn with the height and 2, 5, 8, ... with the width, until
      these numbers are reached.
  """

  vision: QwenConfig
  image_token_id: int = 248_056
  mrope_sections: tuple[int, int, int] = (11, 11, 10)

  def __post_init__(self):
    super().__post_init__()
    natural = checks.NOT_NEGATIVE
    checks.fields(self, image_token_id=natural, mrope_sections=natural)
    if len(self.mrope_sections) != 3:
      raise ValueError(
        f"mrope_sections is {self.mrope_sections}; expected the numbers of pairs of "
        "time, height and width"
      )
    if self.rope.scaling == "longrope" or self.rope.query_beta is not None:
      raise ValueError(
        f"rope is {self.rope}; expected neither longrope nor query_beta, which have no "
        "form for three axes"
      )
    if len(self.vision.deepstack) > self.num_layers:
      raise ValueError(
        f"vision.deepstack has {len(self.vision.deepstack)} layers; expected at most "
        f"num_layers {self.num_layers}, which add their features"
      )

  @property
  def soft_token(self) -> int:
    """See `VisionLanguageConfig`."""
    return self.image_token_id

  @property
  def image_sizes(self) -> tuple[int, int]:
    """See `VisionLanguageConfig`."""
    return self.vision.patch_size, self.vision.merge

  @property
  def pair_axes(self) -> np.ndarray:
    """The axis of each rotated pair: 0, 1 or 2."""
    pairs = np.arange(self.rope.rotated(self.head_dim) // 2)
    axes = pairs % 3
    return np.where(pairs < 3 * np.asarray(self.mrope_sections)[axes], axes, 0)

  def rope_offsets(self, tokens, images, segment_ids=None) -> jax.Array:
    """See `VisionLanguageConfig`."""
    return rope_offsets(tokens, jnp.asarray(images[1]), self, segment_ids)


def places(grid: Int[Array, "n N 3"], count: int, merge: int) -> Places:
  """Returns the places of patches that lie image by image and square by square.

  Args:
    grid: 1, rows and columns of the images; zeros for a missing one.
    count: number of patches P of a row, padding included; a multiple of merge^2.
    merge: number of patches along a square.
  """
  square = pixtral.places(grid[..., 1:] // merge, count // merge**2)
  down, right = jnp.divmod(jnp.arange(merge**2, dtype=jnp.int32), merge)
  parts = (
    square.owner[..., None] + 0 * down,
    square.row[..., None] * merge + down,
    square.column[..., None] * merge + right,
  )
  return Places(*(part.reshape(len(grid), count) for part in parts))


def is_whole(grid: Int[Array, "n N 3"], count: int, merge: int) -> Bool[Array, " n"]:
  """Returns True for rows of P = `count` patches with whole images of one frame."""
  sizes = jnp.prod(grid, axis=-1)
  fits = jnp.sum(sizes, axis=-1) <= count
  whole = (grid[..., 1:] >= 0) & (grid[..., 1:] % merge == 0)
  one = (grid[..., 0] == 1) | (sizes == 0)
  return fits & jnp.all(whole, axis=(1, 2)) & jnp.all(one, axis=1)


def rope_offsets(
  tokens: Int[Array, "B T"],
  grid: Int[Array, "N 3"] | Int[Array, "B N 3"],
  config: QwenImagesConfig,
  segment_ids: Int[Array, "B T"] | None = None,
) -> Int[Array, "B T R/2"]:
  """Returns what is added to positions that count all tokens by one.

  The token at row r and column c of an image of a x b soft tokens that begins at the
  position p has the positions (p, p + r, p + c), and the text after it continues at
  p + max(a, b).

  Args:
    tokens: token ids.
    grid: 1, rows and columns in patches of the images of the batch, or of each row;
      adjacent rows may share images, see `scatter_images`.
    config: the model's configuration.
    segment_ids: segments of packed rows, see `Transformer.__call__`.
  """
  rows = tokens if grid.ndim == 3 else tokens.reshape(1, -1)
  grid = grid if grid.ndim == 3 else grid[None]
  grid = jnp.repeat(grid, len(rows) // len(grid), axis=0)
  coarse = jnp.pad(grid[..., 1:] // config.vision.merge, ((0, 0), (0, 1), (0, 0)))
  is_image = rows == config.soft_token
  order = jnp.maximum(jnp.cumsum(is_image, axis=1) - 1, 0)
  at = pixtral.places(coarse, rows.shape[1])
  owner, row, column = (
    jnp.where(is_image, jnp.take_along_axis(part, order, axis=1), 0) for part in at
  )
  size = jnp.take_along_axis(coarse, jnp.minimum(owner, grid.shape[1])[..., None], 1)
  ends = is_image & (row == size[..., 0] - 1) & (column == size[..., 1] - 1)
  # The tokens of an image that take no position of their own.
  surplus = jnp.prod(size, axis=-1) - jnp.max(size, axis=-1)
  jump, row, column, within = (
    part.reshape(tokens.shape)
    for part in (jnp.where(ends, surplus, 0), row, column, row * size[..., 1] + column)
  )
  before = jnp.cumsum(jump, axis=1) - jump
  if segment_ids is not None:
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    # Padding begins no segment: in a `SharedPrompt` it lies between completions.
    begun = jax.lax.cummax(segment_ids, axis=1)
    start = index - masks.positions_from_segments(begun)
    before -= jnp.take_along_axis(before, start, axis=1)
  within = jnp.where(tokens == config.soft_token, within, 0)
  axes = config.pair_axes
  place = jnp.where(axes == 1, row[..., None], 0)
  place += jnp.where(axes == 2, column[..., None], 0)
  return (place - (before + within)[..., None]).astype(jnp.int32)


class QwenTower(nnx.Module):
  """Encoder of images, which returns one vector per patch.

  Attributes:
    config: shape and options.
    patch_embedding, position_embedding, layers: the modules; `layers` is one module of
      stacked weights [L, ...]. The kernels of the two frames are kept apart, so that
      they are saved as they were loaded.
  """

  def __init__(self, config: QwenConfig, *, rngs: nnx.Rngs):
    c = self.config = config
    make = LayerMaker(c.sharding, c.param_dtype, rngs)
    self.patch_embedding = PatchEmbedding(c, rngs, frames=FRAMES)
    self.position_embedding = make.embedding(c.table_size**2, c.embed_dim)
    self.layers = siglip.make_layers(c, rngs, fused=True)
    retype(self, FrozenParam)

  def __call__(
    self, values: Float[Array, "n P d"], grid: Int[Array, "n N 3"]
  ) -> list[Float[Array, "n P Dv"]]:
    """Encodes images.

    Args:
      values: the pixels of the patches, in squares of m x m patches, row by row, and
        image after image; d counts rows, columns and channels of a patch in this order.
      grid: 1, rows and columns of the images in patches; zeros for a missing one.

    Returns:
      Vectors of the patches after the last layer, and after the layers of `deepstack`,
      in the compute dtype; those of padding mean nothing.

    Raises:
      TypeError: the pixels are not float, or the grid is not of integers.
      ValueError: a patch has another size, or the grid has another shape, or the
        patches are no squares.
    """
    c, edge = self.config, self.config.patch_size
    pixtral.check_patches(values, grid, edge, numbers=3)
    count = values.shape[1]
    if count % c.merge**2:
      raise ValueError(
        f"values have {count} patches, expected a multiple of {c.merge**2}, those of a "
        "soft token: use the model's image processor"
      )
    with jax.named_scope("patches"):
      at = places(grid, count, c.merge)
      x = jnp.asarray(values, c.dtype).reshape(*values.shape[:2], edge, edge, CHANNELS)
      x = self.patch_embedding.embed(x)
      x = sharding.pin_activations(x + self._positions(at, grid, x.dtype), c.sharding)
    turned = pixtral.angles(at, c.embed_dim // c.num_heads, c.rope_theta, odd=0)
    last, kept = run_and_keep(self.layers, x, c, turned, at.owner, keep=c.deepstack)
    return [last, *kept]

  def _positions(self, at: Places, grid: jax.Array, dtype: Any) -> jax.Array:
    """Interpolates the table: its corners are the corners of each image."""
    table = self.position_embedding.embedding[...].astype(jnp.float32)
    side, known = self.config.table_size, jnp.minimum(at.owner, grid.shape[1] - 1)
    taps = []
    for axis, place in ((1, at.row), (2, at.column)):
      last = jnp.take_along_axis(grid[..., axis], known, axis=1) - 1
      steps = jnp.maximum(last, 1)
      low, rest = jnp.divmod(jnp.clip(place, 0, steps) * (side - 1), steps)
      share = (rest / steps)[..., None]
      taps.append(((low, 1 - share), (jnp.minimum(low + 1, side - 1), share)))
    parts = [
      table[row * side + column] * (by_row * by_column)
      for row, by_row in taps[0]
      for column, by_column in taps[1]
    ]
    return sum(parts[1:], parts[0]).astype(dtype)


class Merger(nnx.Module):
  """Projector of squares of patches to soft tokens.

  Attributes:
    norm: layer norm, of the patches, or of whole squares if `wide`.
    fc1, fc2: linear maps [m^2 Dv, m^2 Dv] and [m^2 Dv, D], with a GELU between them.
  """

  def __init__(self, c: QwenConfig, text_dim: int, *, wide: bool, rngs: nnx.Rngs):
    make = LayerMaker(c.sharding, c.param_dtype, rngs)
    self.patches, self.wide = c.merge**2, wide
    width = self.patches * c.embed_dim
    self.norm = siglip.layer_norm(c, make, width if wide else None)
    self.fc1 = make.linear(width, width, "in_out", bias=True)
    self.fc2 = make.linear(width, text_dim, "out_in", bias=True)

  def __call__(self, x: Float[Array, "n P Dv"]) -> Float[Array, "n K D"]:
    """Returns one vector for each of K = P / m^2 squares."""
    n, count, dim = x.shape
    x = x if self.wide else self.norm(x)
    x = x.reshape(n, count // self.patches, self.patches * dim)
    x = self.norm(x) if self.wide else x
    return self.fc2(ACTIVATIONS["gelu"](self.fc1(x)))


class Projector(nnx.Module):
  """The projectors of a tower.

  Attributes:
    merger: that of the last layer.
    deepstack: those of `QwenConfig.deepstack`, in this order.
  """

  def __init__(self, c: QwenConfig, text_dim: int, *, rngs: nnx.Rngs):
    self.merger = Merger(c, text_dim, wide=False, rngs=rngs)
    more = [Merger(c, text_dim, wide=True, rngs=rngs) for _ in c.deepstack]
    self.deepstack = nnx.data(nnx.List(more))
    self.merge = c.merge

  def __call__(
    self, layers: list[Float[Array, "n P Dv"]], grid: Int[Array, "n N 3"]
  ) -> list[Float[Array, "n K D"]]:
    """Returns the vectors of K = P / m^2 soft tokens; those of padding are NaN."""
    mergers = [self.merger, *self.deepstack]
    with jax.named_scope("projector"):
      vectors = [merger(x) for merger, x in zip(mergers, layers, strict=True)]
      count = jnp.sum(jnp.prod(grid, axis=-1), axis=-1) // self.merge**2
      index = jnp.arange(vectors[0].shape[1], dtype=jnp.int32)
      whole = is_whole(grid, layers[0].shape[1], self.merge)
      valid = whole[:, None] & (index < count[:, None])
      return [jnp.where(valid[..., None], x, jnp.nan) for x in vectors]


class QwenImages(PatchesModel):
  """A decoder with this tower; see `PatchesModel`."""

  config: QwenImagesConfig
  vision_tower: QwenTower
  multi_modal_projector: Projector

  def __init__(self, config: QwenImagesConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    tower = in_model(config.vision, config)
    self.vision_tower = QwenTower(tower, rngs=rngs)
    self.multi_modal_projector = Projector(tower, config.embed_dim, rngs=rngs)
