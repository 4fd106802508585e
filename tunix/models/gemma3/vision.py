"""The vision tower of Gemma 3, and the projector into the text model's space.

The tower is the encoder of SigLIP (Zhai et al. 2023, arXiv:2303.15343) without its
pooling head: a plain ViT in which every patch attends to every patch. Gemma 3
(arXiv:2503.19786) pools its 64x64 patches to 16x16 soft tokens per image. The tokens
that they replace are in image_tokens.py, the names of the weights in vision_params.py.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tunix.models.transformer.config import REMAT_POLICIES, ShardingRules, scans
from tunix.models.transformer.dense.layers import Linear, fresh, gelu_tanh, param
from tunix.models.transformer.layer_maker import LayerMaker
from tunix.models.transformer.shards import sharding
from tunix.models.transformer.unstack import layer_states
from tunix.utils import checks

CHANNELS = 3

# Number of queries in a block of scores. With 16 heads and 4096 keys in float32, 1024
# queries take 256 MiB per image; all 4096 queries would take 1 GiB.
QUERY_BLOCK = 1024

_RULES = ShardingRules()


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
  """Shape and options of the vision tower; the defaults are Gemma 3's (4B to 27B).

  Attributes:
    num_layers: number of layers L.
    embed_dim: width Dv of the tower.
    hidden_dim: width F of the MLP.
    num_heads: number of heads N, which must divide embed_dim.
    patch_size, image_size: edges in pixels; patch_size must divide image_size.
    norm_eps: epsilon of the layer norms and of the projector's RMS norm.
    tokens_per_image: soft tokens S per image, a square number whose root divides the
      number of patches along an edge.
    param_dtype: dtype of the weights.
    dtype: dtype of the computation; norms, softmax and pooling are always float32.
    remat: the results that the backward pass recomputes, as in `TransformerConfig`;
      "offload" works like "block".
    scan_layers: as in `TransformerConfig`.
    sharding: mesh axes of the weights and activations.
  """

  num_layers: int = 27
  embed_dim: int = 1152
  hidden_dim: int = 4304
  num_heads: int = 16
  patch_size: int = 14
  image_size: int = 896
  norm_eps: float = 1e-6
  tokens_per_image: int = 256
  param_dtype: DTypeLike = jnp.float32
  dtype: DTypeLike = jnp.float32
  remat: Literal["none", "block", "dots", "offload"] = "none"
  scan_layers: bool | None = None
  sharding: ShardingRules = _RULES

  def __post_init__(self):
    sizes = "num_layers embed_dim hidden_dim num_heads patch_size image_size"
    counts = dict.fromkeys((*sizes.split(), "tokens_per_image"), checks.COUNT)
    checks.fields(self, **counts, norm_eps=checks.POSITIVE)
    if self.embed_dim % self.num_heads:
      raise ValueError(
        f"num_heads {self.num_heads} must divide embed_dim {self.embed_dim}"
      )
    if self.image_size % self.patch_size:
      raise ValueError(
        f"patch_size {self.patch_size} must divide image_size {self.image_size}"
      )
    if self.pooled_grid**2 != self.tokens_per_image or self.grid % self.pooled_grid:
      raise ValueError(
        f"tokens_per_image is {self.tokens_per_image}, expected the square of a "
        f"divisor of {self.grid}, the patches of an image's edge"
      )
    if self.remat not in ("none", *REMAT_POLICIES):
      names = ", ".join(("none", *REMAT_POLICIES))
      raise ValueError(f"remat {self.remat!r} must be one of {names}")

  moe = None  # see `params.Stacks`

  def layers_of(self, path: str) -> range:
    """Returns the numbers of the layers in the stack with the parameter `path`."""
    del path
    return range(self.num_layers)

  @property
  def grid(self) -> int:
    """Patches along an edge of the image."""
    return self.image_size // self.patch_size

  @property
  def pooled_grid(self) -> int:
    """Soft tokens along an edge of the image."""
    return math.isqrt(self.tokens_per_image)

  @property
  def scanned(self) -> bool:
    """True if the layers run in `lax.scan`, see `config.scans`."""
    return scans(self.scan_layers, self.num_layers)


class LayerNorm(nnx.Module):
  """(x - mean) / sqrt(var + eps) * scale + bias in float32 (arXiv:1607.06450)."""

  def __init__(
    self,
    dim: int,
    eps: float,
    *,
    stack: tuple[int, ...] = (),
    spec: tuple[Any, ...],
    param_dtype: DTypeLike = jnp.float32,
  ):
    self.scale = param(jnp.ones((*stack, dim), param_dtype), spec)
    self.bias = param(jnp.zeros((*stack, dim), param_dtype), spec)
    self.eps = eps

  def __call__(self, x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
    y = y * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)
    return y.astype(x.dtype)


def _layer_norm(c: VisionConfig, make: LayerMaker) -> LayerNorm:
  spec = make.spec("norm")
  return LayerNorm(
    c.embed_dim, c.norm_eps, stack=make.stack, spec=spec, param_dtype=c.param_dtype
  )


class PatchEmbedding(nnx.Module):
  """A convolution whose stride is its kernel size, as one product over patches.

  Attributes:
    kernel: [width, height, channel, Dv], the checkpoint's [Dv, channel, height, width]
      with all axes reversed: the loader's transpose reverses all axes.
    bias: [Dv].
  """

  def __init__(self, config: VisionConfig, rngs: nnx.Rngs):
    c, rules = config, config.sharding
    shape = (c.patch_size, c.patch_size, CHANNELS, c.embed_dim)
    draw = fresh(rngs.params(), shape)
    spec = (None, None, None, rules.weight_axes)
    self.kernel = param(draw.astype(c.param_dtype), spec)
    self.bias = param(jnp.zeros(c.embed_dim, c.param_dtype), (rules.weight_axes,))

  def __call__(self, pixels: Float[Array, "n Y X C"]) -> Float[Array, "n P Dv"]:
    edge, _, channels, dim = self.kernel.shape
    n, height, width, _ = pixels.shape
    x = pixels.reshape(n, height // edge, edge, width // edge, edge, channels)
    x = x.transpose(0, 1, 3, 4, 2, 5).reshape(n, -1, edge * edge * channels)
    kernel = self.kernel[...].reshape(-1, dim).astype(x.dtype)
    return x @ kernel + self.bias[...].astype(x.dtype)


def attend_all(
  query: Float[Array, "n P N H"],
  key: Float[Array, "n P N H"],
  value: Float[Array, "n P N H"],
  block: int = QUERY_BLOCK,
) -> Float[Array, "n P N H"]:
  """Returns softmax(q k^T / sqrt(H)) v without a mask.

  Scores and softmax are float32. They are computed for at most `block` queries at a
  time and recomputed in the backward pass, so that no [P, P] array is held.
  """
  n, patches, heads, head_dim = query.shape
  size = max(d for d in range(1, min(block, patches) + 1) if patches % d == 0)

  def one(part: jax.Array) -> jax.Array:
    scores = jnp.einsum(
      "nqhd,nkhd->nhqk", part, key, preferred_element_type=jnp.float32
    )
    weights = jax.nn.softmax(scores * head_dim**-0.5, axis=-1).astype(value.dtype)
    return jnp.einsum("nhqk,nkhd->nqhd", weights, value)

  if size == patches:
    return one(query)
  parts = query.reshape(n, patches // size, size, heads, head_dim).swapaxes(0, 1)
  out = jax.lax.map(jax.checkpoint(one), parts)
  return out.swapaxes(0, 1).reshape(query.shape)


class VisionAttention(nnx.Module):
  """Bidirectional self-attention with biases; q, k, v, out are [Dv, Dv]."""

  def __init__(
    self,
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    out_proj: Linear,
    *,
    num_heads: int,
  ):
    self.q_proj, self.k_proj = q_proj, k_proj
    self.v_proj, self.out_proj = v_proj, out_proj
    self.num_heads = num_heads

  def __call__(self, x: Float[Array, "n P Dv"]) -> Float[Array, "n P Dv"]:
    heads = (*x.shape[:2], self.num_heads, -1)
    query, key, value = (
      proj(x).reshape(heads) for proj in (self.q_proj, self.k_proj, self.v_proj)
    )
    return self.out_proj(attend_all(query, key, value).reshape(x.shape))


class VisionMLP(nnx.Module):
  """fc2(gelu(fc1(x))), with the tanh form of gelu (arXiv:1606.08415)."""

  def __init__(self, fc1: Linear, fc2: Linear):
    self.fc1, self.fc2 = fc1, fc2

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.fc2(gelu_tanh(self.fc1(x)))


class VisionLayer(nnx.Module):
  """Attention and MLP, each after a layer norm and added to the residual stream."""

  def __init__(self, config: VisionConfig, stack: tuple[int, ...], rngs: nnx.Rngs):
    d, f = config.embed_dim, config.hidden_dim
    make = LayerMaker(config.sharding, config.param_dtype, rngs, stack)
    linear = functools.partial(make.linear, bias=True)
    self.layer_norm1 = _layer_norm(config, make)
    self.attn = VisionAttention(
      linear(d, d, "in_out"),
      linear(d, d, "in_out"),
      linear(d, d, "in_out"),
      linear(d, d, "out_in"),
      num_heads=config.num_heads,
    )
    self.layer_norm2 = _layer_norm(config, make)
    self.mlp = VisionMLP(linear(d, f, "in_out"), linear(f, d, "out_in"))
    self.rules = config.sharding

  def __call__(self, x: Float[Array, "n P Dv"]) -> Float[Array, "n P Dv"]:
    with jax.named_scope("attn"):
      x = sharding.pin_activations(x + self.attn(self.layer_norm1(x)), self.rules)
    with jax.named_scope("mlp"):
      x = x + self.mlp(self.layer_norm2(x))
    return sharding.pin_activations(x, self.rules)


class VisionTower(nnx.Module):
  """Encoder of images, which returns one vector per patch.

  Attributes:
    config: shape and options.
    patch_embedding, position_embedding, layers, post_layernorm: the modules; `layers`
      is one module of stacked weights [L, ...].
  """

  def __init__(self, config: VisionConfig, *, rngs: nnx.Rngs):
    c = self.config = config
    make = LayerMaker(c.sharding, c.param_dtype, rngs)
    self.patch_embedding = PatchEmbedding(c, rngs)
    self.position_embedding = make.embedding(c.grid**2, c.embed_dim)
    self.layers = VisionLayer(c, (c.num_layers,), rngs)
    self.post_layernorm = _layer_norm(c, make)

  def __call__(self, pixels: Float[Array, "n Y X C"]) -> Float[Array, "n P Dv"]:
    """Encodes images.

    Args:
      pixels: float, scaled to [-1, 1] (see `images.preprocess`), Y = X = image_size.

    Returns:
      Vectors of the patches in the compute dtype, row by row from the upper left.

    Raises:
      ValueError: the images have another shape.
    """
    c = self.config
    expected = (c.image_size, c.image_size, CHANNELS)
    if pixels.ndim != 4 or pixels.shape[1:] != expected:
      raise ValueError(
        f"pixels have shape {pixels.shape}, expected [images, {c.image_size}, "
        f"{c.image_size}, {CHANNELS}]: resize them with images.preprocess"
      )
    with jax.named_scope("patches"):
      x = self.patch_embedding(jnp.asarray(pixels, c.dtype))
      x = x + self.position_embedding.embedding[...].astype(c.dtype)
      x = sharding.pin_activations(x, c.sharding)
    x = self._run(x)
    with jax.named_scope("post_layernorm"):
      return self.post_layernorm(x)

  def _run(self, x: jax.Array) -> jax.Array:
    """Runs all layers, scanned or unrolled."""
    graph, state = nnx.split(self.layers)

    def call(state, x):
      return nnx.merge(graph, state)(x)

    if self.config.remat != "none":
      call = jax.checkpoint(call, policy=REMAT_POLICIES[self.config.remat])
    if self.config.scanned:
      with jax.named_scope("layers"):
        return jax.lax.scan(lambda x, s: (call(s, x), None), x, state)[0]
    for i, one in enumerate(layer_states(state)):
      with jax.named_scope(f"layer_{i}"):
        x = call(one, x)
    return x


class Projector(nnx.Module):
  """Projector of patches to the soft tokens of an image in the text model.

  Attributes:
    mm_soft_emb_norm: RMS norm over Dv that multiplies by 1 + scale.
    mm_input_projection: kernel [Dv, D], which checkpoints store untransposed.
  """

  def __init__(self, config: VisionConfig, text_dim: int, *, rngs: nnx.Rngs):
    c = self.config = config
    make = LayerMaker(c.sharding, c.param_dtype, rngs)
    self.mm_soft_emb_norm = make.norm(c.embed_dim, c.norm_eps, offset=1.0)
    self.mm_input_projection = make.linear(c.embed_dim, text_dim, "in_out")

  def __call__(self, patches: Float[Array, "n P Dv"]) -> Float[Array, "n S D"]:
    """Averages squares of patches, normalizes the averages and projects them.

    Do not multiply the result by sqrt(D); only embeddings of text are scaled.
    """
    c = self.config
    n, _, dim = patches.shape
    edge = c.grid // c.pooled_grid
    squares = (n, c.pooled_grid, edge, c.pooled_grid, edge, dim)
    with jax.named_scope("projector"):
      x = jnp.mean(patches.reshape(squares).astype(jnp.float32), axis=(2, 4))
      x = x.astype(patches.dtype).reshape(n, c.tokens_per_image, dim)
      return self.mm_input_projection(self.mm_soft_emb_norm(x))
