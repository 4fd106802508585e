"""SigLIP's encoder: layer norms, biases and learned positions.

It is a plain ViT in which every patch attends to every patch (Zhai et al. 2023,
arXiv:2303.15343), without its pooling head. Gemma 3 and SmolVLM2 use it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from tunix.models.transformer.dense.layers import FrozenParam, Linear, gelu_tanh
from tunix.models.transformer.layer_maker import LayerMaker
from tunix.models.transformer.shards import sharding
from tunix.models.vision.config import CHANNELS, TowerConfig
from tunix.models.vision.layers import (
  LayerNorm,
  PatchEmbedding,
  VisionAttention,
  VisionLayer,
  check_dtype,
  retype,
  run_layers,
)
from tunix.utils import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiglipConfig(TowerConfig):
  """`TowerConfig` of square images of one size.

  Attributes:
    image_size: edge of an image in pixels; patch_size must divide it.
  """

  image_size: int

  def __post_init__(self):
    super().__post_init__()
    checks.fields(self, image_size=checks.COUNT)
    if self.image_size % self.patch_size:
      raise ValueError(
        f"patch_size {self.patch_size} must divide image_size {self.image_size}"
      )

  @property
  def grid(self) -> int:
    """Patches along an edge of the image."""
    return self.image_size // self.patch_size


def layer_norm(c: TowerConfig, make: LayerMaker, dim: int | None = None) -> LayerNorm:
  """Makes a norm of vectors of `dim` numbers; None for the width of the tower."""
  spec, dim = make.spec("norm"), dim or c.embed_dim
  return LayerNorm(
    dim, c.norm_eps, stack=make.stack, spec=spec, param_dtype=c.param_dtype
  )


class VisionMLP(nnx.Module):
  """fc2(gelu(fc1(x))), with the tanh form of gelu (arXiv:1606.08415)."""

  def __init__(self, fc1: Linear, fc2: Linear):
    self.fc1, self.fc2 = fc1, fc2

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.fc2(gelu_tanh(self.fc1(x)))


def make_layers(c: TowerConfig, rngs: nnx.Rngs, *, fused: bool = False) -> VisionLayer:
  """Makes the stack of layers; `fused` joins the maps of queries, keys and values."""
  d, f = c.embed_dim, c.hidden_dim
  make = LayerMaker(c.sharding, c.param_dtype, rngs, (c.num_layers,))
  attn = VisionAttention(make, d, num_heads=c.num_heads, bias=True, fused=fused)
  mlp = VisionMLP(
    make.linear(d, f, "in_out", bias=True), make.linear(f, d, "out_in", bias=True)
  )
  norms = layer_norm(c, make), layer_norm(c, make)
  return VisionLayer(norms[0], attn, norms[1], mlp, c.sharding)


class SiglipTower(nnx.Module):
  """Encoder of images, which returns one vector per patch.

  Attributes:
    config: shape and options.
    patch_embedding, position_embedding, layers, post_layernorm: the modules; `layers`
      is one module of stacked weights [L, ...].
  """

  def __init__(self, config: SiglipConfig, *, rngs: nnx.Rngs):
    c = self.config = config
    make = LayerMaker(c.sharding, c.param_dtype, rngs)
    self.patch_embedding = PatchEmbedding(c, rngs)
    self.position_embedding = make.embedding(c.grid**2, c.embed_dim)
    self.layers = make_layers(c, rngs)
    self.post_layernorm = layer_norm(c, make)
    retype(self, FrozenParam)

  def __call__(self, pixels: Float[Array, "n Y X C"]) -> Float[Array, "n P Dv"]:
    """Encodes images.

    Args:
      pixels: float, scaled to [-1, 1], Y = X = image_size.

    Returns:
      Vectors of the patches in the compute dtype, row by row from the upper left.

    Raises:
      TypeError: the pixels are not float.
      ValueError: the images have another shape.
    """
    c = self.config
    check_dtype(pixels)
    expected = (c.image_size, c.image_size, CHANNELS)
    if pixels.ndim != 4 or pixels.shape[1:] != expected:
      raise ValueError(
        f"pixels have shape {pixels.shape}, expected [images, {c.image_size}, "
        f"{c.image_size}, {CHANNELS}]: resize the images to the tower's size"
      )
    with jax.named_scope("patches"):
      x = self.patch_embedding(jnp.asarray(pixels, c.dtype))
      x = x + self.position_embedding.embedding[...].astype(c.dtype)
      x = sharding.pin_activations(x, c.sharding)
    x = run_layers(self.layers, x, c)
    with jax.named_scope("post_layernorm"):
      return self.post_layernorm(x)
