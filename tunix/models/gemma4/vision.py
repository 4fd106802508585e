"""Gemma 4's vision tower of images of any size, and its pooler and projector.

Its layers are those of the text model without causal order: norms before and after
attention and MLP, norms of queries, keys and values. Half of a head is rotated by the
column, and half by the row. `transformers` has the original (`models/gemma4`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from tunix.models.transformer.attention import rope
from tunix.models.transformer.config import Activation, RopeConfig
from tunix.models.transformer.dense.layers import (
  ACTIVATIONS,
  FrozenParam,
  Linear,
  unit_rms,
)
from tunix.models.transformer.dense.mlp import GatedMLP
from tunix.models.transformer.layer_maker import LayerMaker
from tunix.models.transformer.shards import sharding
from tunix.models.vision.config import CHANNELS, TowerConfig
from tunix.models.vision.layers import (
  VisionAttention,
  VisionLayer,
  attend_all,
  constant,
  retype,
  run_layers,
)
from tunix.models.vision.pixtral import (
  Places,
  check_heads,
  check_patches,
  places,
  squares,
)
from tunix.utils import checks

# The limits of a clipped map, and their values in a new model.
LIMITS = {
  "input_min": -math.inf,
  "input_max": math.inf,
  "output_min": -math.inf,
  "output_max": math.inf,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4TowerConfig(TowerConfig):
  """`TowerConfig` of Gemma 4.

  Attributes:
    pooling: edge of the square of patches whose average makes one soft token.
    num_positions: number of learned positions of rows, and of columns.
    activation: activation function of the gated MLP.
    rope_theta: base of the rotary frequencies.
    clipped: if True, inputs and outputs of the layers' linear maps are limited to
      numbers of the checkpoint (E2B, E4B).
    standardized: if True, the averages are shifted and scaled by numbers of the
      checkpoint (31B, 26B-A4B).
  """

  pooling: int = 3
  num_positions: int = 10_240
  activation: Activation = "gelu_tanh"
  rope_theta: float = 100.0
  clipped: bool = False
  standardized: bool = False

  def __post_init__(self):
    super().__post_init__()
    counts = {"pooling": checks.COUNT, "num_positions": checks.COUNT}
    checks.fields(self, rope_theta=checks.POSITIVE, **counts)
    check_heads(self)


class ClippedLinear(Linear):
  """A linear map with limits of its inputs and outputs.

  Attributes:
    input_min, input_max, output_min, output_max: the limits [*stack].
  """

  def __init__(self, *sizes: int, **options: Any):
    super().__init__(*sizes, **options)
    for name, value in LIMITS.items():
      limit = jnp.full(options["stack"], value, options["param_dtype"])
      setattr(self, name, constant(limit))

  def __call__(self, x: jax.Array) -> jax.Array:
    limits = [getattr(self, name)[...].astype(x.dtype) for name in LIMITS]
    return jnp.clip(super().__call__(jnp.clip(x, *limits[:2])), *limits[2:])


class _ClippedMaker(LayerMaker):
  """A `LayerMaker` whose linear maps are clipped."""

  def linear(
    self, in_dim: int, out_dim: int, kind: str, *, bias: bool = False, experts: int = 0
  ) -> Linear:
    assert not experts
    return ClippedLinear(
      in_dim,
      out_dim,
      stack=self.stack,
      spec=self.spec(kind),
      use_bias=bias,
      param_dtype=self.param_dtype,
      rngs=self.rngs,
    )


class _Attention(VisionAttention):
  """`VisionAttention` of normalized queries, keys and values, with scores of scale 1.

  The norm of the values has no scale.
  """

  def __init__(self, make: LayerMaker, config: Gemma4TowerConfig):
    dim, self.eps = config.embed_dim, config.norm_eps
    super().__init__(make, dim, num_heads=config.num_heads, bias=False)
    self.q_norm = make.norm(dim // self.num_heads, self.eps)
    self.k_norm = make.norm(dim // self.num_heads, self.eps)

  def __call__(
    self,
    x: Float[Array, "n P Dv"],
    angles: Any = None,
    owners: Int[Array, "n P"] | None = None,
  ) -> Float[Array, "n P Dv"]:
    """Attends; `angles` are those of columns and of rows."""
    heads = (*x.shape[:2], self.num_heads, x.shape[-1] // self.num_heads)
    query = self.q_norm(self.q_proj(x).reshape(heads))
    key = self.k_norm(self.k_proj(x).reshape(heads))
    value = unit_rms(self.v_proj(x).reshape(heads), self.eps).astype(x.dtype)
    query, key = _rotated(query, angles), _rotated(key, angles)
    out = attend_all(query, key, value, owners=owners, scale=1.0)
    return self.out_proj(out.reshape(x.shape))


def _angles(at: Places, head_dim: int, theta: float) -> tuple[rope.Angles, rope.Angles]:
  """Returns the rotary angles of columns and of rows, for halves of a head."""
  waves = rope.frequencies(head_dim // 2, RopeConfig(theta=theta))
  both = (place[..., None, None] * waves for place in (at.column, at.row))
  columns, rows = (rope.Angles(jnp.sin(x), jnp.cos(x)) for x in both)
  return columns, rows


def _rotated(x: Float[Array, "n P N H"], angles: tuple[rope.Angles, rope.Angles]):
  halves = jnp.split(x, 2, axis=-1)
  turned = [rope.rotate(half, angle) for half, angle in zip(halves, angles)]
  return jnp.concatenate(turned, axis=-1)


def _layers(c: Gemma4TowerConfig, rngs: nnx.Rngs) -> VisionLayer:
  """Makes the stack of layers."""
  d, f = c.embed_dim, c.hidden_dim
  maker = _ClippedMaker if c.clipped else LayerMaker
  make = maker(c.sharding, c.param_dtype, rngs, (c.num_layers,))
  mlp = GatedMLP(
    make.linear(d, f, "in_out"),
    make.linear(d, f, "in_out"),
    make.linear(f, d, "out_in"),
    ACTIVATIONS[c.activation],
  )
  first, second, third, fourth = (make.norm(d, c.norm_eps) for _ in range(4))
  return VisionLayer(
    first, _Attention(make, c), second, mlp, c.sharding, (third, fourth)
  )


class Gemma4Tower(nnx.Module):
  """Encoder of images, which returns one vector per patch.

  Attributes:
    config: shape and options.
    patch_projection: linear map of the pixels of a patch, [patch^2 * 3, Dv].
    positions: learned positions of columns and of rows, [2, num_positions, Dv].
    layers: one module of stacked weights [L, ...].
  """

  def __init__(self, config: Gemma4TowerConfig, *, rngs: nnx.Rngs):
    c = self.config = config
    make = LayerMaker(c.sharding, c.param_dtype, rngs)
    self.patch_projection = make.linear(
      c.patch_size**2 * CHANNELS, c.embed_dim, "in_out"
    )
    self.positions = make.small((2, c.num_positions, c.embed_dim))
    self.layers = _layers(c, rngs)
    retype(self, FrozenParam)

  def __call__(
    self, values: Float[Array, "n P d"], grid: Int[Array, "n N 2"]
  ) -> Float[Array, "n P Dv"]:
    """Encodes images, see `PixtralTower.__call__`; the pixels are in [0, 1]."""
    c = self.config
    check_patches(values, grid, c.patch_size)
    at = places(grid, values.shape[1])
    with jax.named_scope("patches"):
      x = self.patch_projection(jnp.asarray(2 * values - 1, c.dtype))
      tables = self.positions[...].astype(c.dtype)
      for table, place in zip(tables, (at.column, at.row)):
        x = x + jnp.take(table, place, axis=0, mode="clip")
      x = sharding.pin_activations(x, c.sharding)
    angles = _angles(at, c.embed_dim // c.num_heads, c.rope_theta)
    return run_layers(self.layers, x, c, angles, at.owner)


class Projector(nnx.Module):
  """Averages of squares of patches, and their projection to soft tokens.

  The averages are multiplied by sqrt(Dv), standardized, and divided by their rms.

  Attributes:
    std_bias, std_scale: numbers [Dv] that standardize the averages, or None.
    linear: linear map [Dv, D].
  """

  def __init__(self, tower: Gemma4TowerConfig, embed_dim: int, *, rngs: nnx.Rngs):
    c = self.config = tower
    make = LayerMaker(c.sharding, c.param_dtype, rngs)
    self.linear = make.linear(c.embed_dim, embed_dim, "in_out")
    bias = jnp.zeros(c.embed_dim, c.param_dtype)
    self.std_bias = nnx.data(constant(bias) if c.standardized else None)
    self.std_scale = nnx.data(constant(bias + 1) if c.standardized else None)

  def __call__(
    self, patches: Float[Array, "n P Dv"], grid: Int[Array, "n N 2"]
  ) -> Float[Array, "n K D"]:
    """Returns the vectors of K = P / pooling^2 soft tokens.

    Those of padding are NaN; so are those of all images of a row in which an image does
    not consist of squares, or has more rows or columns than there are positions.
    """
    c = self.config
    index, valid = squares(grid, patches.shape[1], c.pooling)
    valid &= jnp.all(grid <= c.num_positions, axis=(1, 2))[:, None]
    with jax.named_scope("projector"):
      x = jax.vmap(lambda row, at: row[at])(patches.astype(jnp.float32), index)
      x = jnp.mean(x, axis=2) * c.embed_dim**0.5
      if self.std_bias is not None and self.std_scale is not None:
        x = (x - self.std_bias[...]) * self.std_scale[...]
      x = self.linear(unit_rms(x, c.norm_eps).astype(patches.dtype))
      return jnp.where(valid[..., None], x, jnp.nan)
