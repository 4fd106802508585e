"""The layers of vision towers: patches, attention without a mask, and the stack."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tunix.models.transformer.attention import rope
from tunix.models.transformer.config import REMAT_POLICIES, ShardingRules
from tunix.models.transformer.dense.layers import FrozenParam, RMSNorm, fresh, param
from tunix.models.transformer.layer_maker import LayerMaker
from tunix.models.transformer.shards import sharding
from tunix.models.transformer.unstack import layer_states
from tunix.models.vision.config import CHANNELS, TowerConfig

# Number of queries in a block of scores. With 16 heads and 4096 keys in float32, 1024
# queries take 256 MiB per image; all 4096 queries would take 1 GiB.
QUERY_BLOCK = 1024


class Constant(FrozenParam):
  """An array of the checkpoint that is never trained, a buffer in transformers."""


def constant(value: jax.Array) -> Constant:
  """Makes a constant that no mesh splits."""
  return Constant(value, out_sharding=(None,) * value.ndim, eager_sharding=False)


def retype(tower: nnx.Module, kind: type[nnx.Param]) -> None:
  """Gives the weights of a tower another type, in place; not constants or adapters.

  Args:
    tower: the tower; constructors of towers call this with `FrozenParam`.
    kind: the type, which decides whether trainers train them.
  """
  for _, module in nnx.iter_modules(tower):
    for name, old in list(vars(module).items()):
      if type(old) in (nnx.Param, FrozenParam):
        spec = old.get_metadata("out_sharding")
        new = kind(old.get_value(), out_sharding=spec, eager_sharding=False)
        setattr(module, name, nnx.data(new))


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


class PatchEmbedding(nnx.Module):
  """A convolution whose stride is its kernel size, as one product over patches.

  Attributes:
    kernel: [width, height, channel, Dv], the checkpoint's [Dv, channel, height, width]
      with all axes reversed: the loader's transpose reverses all axes. With frames it
      is [width, height, frame, channel, Dv], and each patch stands for all frames, so
      that the weights of the frames are summed.
    bias: [Dv], or None.
  """

  def __init__(
    self, config: TowerConfig, rngs: nnx.Rngs, *, bias: bool = True, frames: int = 0
  ):
    c, rules = config, config.sharding
    depth = (frames,) if frames else ()
    shape = (c.patch_size, c.patch_size, *depth, CHANNELS, c.embed_dim)
    draw = fresh(rngs.params(), shape)
    spec = (*(None,) * (len(shape) - 1), rules.weight_axes)
    self.kernel = param(draw.astype(c.param_dtype), spec)
    zeros = jnp.zeros(c.embed_dim, c.param_dtype)
    self.bias = nnx.data(param(zeros, (rules.weight_axes,)) if bias else None)

  def __call__(self, pixels: Float[Array, "n Y X C"]) -> Float[Array, "n P Dv"]:
    """Embeds the patches of whole images, row by row from the upper left."""
    edge = self.kernel.shape[0]
    n, height, width, channels = pixels.shape
    x = pixels.reshape(n, height // edge, edge, width // edge, edge, channels)
    x = x.transpose(0, 1, 3, 2, 4, 5)
    count = (height // edge) * (width // edge)
    return self.embed(x.reshape(n, count, edge, edge, channels))

  def embed(self, patches: Float[Array, "n P y x C"]) -> Float[Array, "n P Dv"]:
    """Embeds patches."""
    x = patches.swapaxes(2, 3)
    kernel = self.kernel[...]
    if kernel.ndim == 5:
      kernel = jnp.sum(kernel.astype(jnp.float32), axis=2)
    kernel = kernel.reshape(-1, kernel.shape[-1]).astype(x.dtype)
    x = x.reshape(*x.shape[:2], kernel.shape[0]) @ kernel
    return x if self.bias is None else x + self.bias[...].astype(x.dtype)


def check_dtype(pixels: jax.Array) -> None:
  """Refuses pixels that were not scaled.

  Raises:
    TypeError: the pixels are integers, such as the 8-bit levels of an image.
  """
  if not jnp.issubdtype(pixels.dtype, jnp.floating):
    raise TypeError(
      f"pixels are {pixels.dtype}; expected float, scaled as the model's image "
      "processor scales them. Use the processors in tunix.models.images"
    )


def attend_all(
  query: Float[Array, "n P N H"],
  key: Float[Array, "n P N H"],
  value: Float[Array, "n P N H"],
  block: int = QUERY_BLOCK,
  owners: Int[Array, "n P"] | None = None,
  scale: float | None = None,
) -> Float[Array, "n P N H"]:
  """Returns softmax(scale q k^T) v without a causal mask.

  Scores and softmax are float32. They are computed for at most `block` queries at a
  time and recomputed in the backward pass, so that no [P, P] array is held.

  Args:
    query, key, value: of the patches.
    block: largest number of queries in a block.
    owners: number of each patch's image; a patch attends to the patches of its image.
      None lets all patches of a row attend to each other.
    scale: factor of the scores; None for H^(-1/2).
  """
  n, patches, _, head_dim = query.shape
  factor = head_dim**-0.5 if scale is None else scale

  def one(part: tuple[jax.Array, jax.Array | None]) -> jax.Array:
    query, own = part
    scores = jnp.einsum(
      "nqhd,nkhd->nhqk", query, key, preferred_element_type=jnp.float32
    )
    if own is not None and owners is not None:
      same = own[:, None, :, None] == owners[:, None, None, :]
      scores = jnp.where(same, scores, -jnp.inf)  # a patch sees itself at least
    weights = jax.nn.softmax(scores * factor, axis=-1).astype(value.dtype)
    return jnp.einsum("nhqk,nkhd->nqhd", weights, value)

  if patches <= block:
    return one((query, owners))
  blocks = -(-patches // block)
  size = -(-patches // blocks)

  def parts(x: jax.Array) -> jax.Array:
    # Surplus queries repeat the last patch, so that each has a key that it sees.
    surplus = [(0, 0)] * x.ndim
    surplus[1] = (0, blocks * size - patches)
    x = jnp.pad(x, surplus, mode="edge")
    return x.reshape(n, blocks, size, *x.shape[2:]).swapaxes(0, 1)

  out = jax.lax.map(jax.checkpoint(one), jax.tree.map(parts, (query, owners)))
  out = out.swapaxes(0, 1).reshape(n, blocks * size, *query.shape[2:])
  return out[:, :patches]


class VisionAttention(nnx.Module):
  """Bidirectional self-attention; q, k, v, out are [Dv, Dv], a fused qkv [Dv, 3 Dv]."""

  def __init__(
    self,
    make: LayerMaker,
    dim: int,
    *,
    num_heads: int,
    bias: bool,
    fused: bool = False,
  ):
    self.fused = fused
    if fused:
      self.qkv_proj = make.linear(dim, 3 * dim, "in_out", bias=bias)
    else:
      self.q_proj = make.linear(dim, dim, "in_out", bias=bias)
      self.k_proj = make.linear(dim, dim, "in_out", bias=bias)
      self.v_proj = make.linear(dim, dim, "in_out", bias=bias)
    self.out_proj = make.linear(dim, dim, "out_in", bias=bias)
    self.num_heads = num_heads

  def __call__(
    self,
    x: Float[Array, "n P Dv"],
    angles: rope.Angles | None = None,
    owners: Int[Array, "n P"] | None = None,
  ) -> Float[Array, "n P Dv"]:
    """Attends.

    Args:
      x: the patches.
      angles: rotary angles of queries and keys, or None.
      owners: see `attend_all`.
    """
    heads = (*x.shape[:2], self.num_heads, x.shape[-1] // self.num_heads)
    if self.fused:
      parts = jnp.split(self.qkv_proj(x), 3, axis=-1)
    else:
      parts = [proj(x) for proj in (self.q_proj, self.k_proj, self.v_proj)]
    query, key, value = (part.reshape(heads) for part in parts)
    if angles is not None:
      query, key = rope.rotate(query, angles), rope.rotate(key, angles)
    attended = attend_all(query, key, value, owners=owners)
    return self.out_proj(attended.reshape(x.shape))


class VisionLayer(nnx.Module):
  """Attention and MLP, each after a norm and added to the residual stream.

  With `post_norms`, the outputs of attention and MLP have a norm too (Gemma 4).
  """

  def __init__(
    self,
    layer_norm1: LayerNorm | RMSNorm,
    attn: VisionAttention,
    layer_norm2: LayerNorm | RMSNorm,
    mlp: nnx.Module,
    rules: ShardingRules,
    post_norms: tuple[RMSNorm, RMSNorm] | tuple[None, None] = (None, None),
  ):
    self.layer_norm1, self.attn = layer_norm1, attn
    self.layer_norm2, self.mlp = layer_norm2, mlp
    self.post_norm1, self.post_norm2 = map(nnx.data, post_norms)
    self.rules = rules

  def __call__(self, x: Float[Array, "n P Dv"], *inputs: Any) -> Float[Array, "n P Dv"]:
    """Runs the layer; `inputs` are the further ones of `VisionAttention`."""
    with jax.named_scope("attn"):
      out = self.attn(self.layer_norm1(x), *inputs)
      x = x + (out if self.post_norm1 is None else self.post_norm1(out))
      x = sharding.pin_activations(x, self.rules)
    with jax.named_scope("mlp"):
      out = self.mlp(self.layer_norm2(x))
      x = x + (out if self.post_norm2 is None else self.post_norm2(out))
    return sharding.pin_activations(x, self.rules)


def run_layers(
  layers: VisionLayer, x: jax.Array, config: TowerConfig, *inputs: Any
) -> jax.Array:
  """Returns the output of a stack of layers, see `run_and_keep`."""
  return run_and_keep(layers, x, config, *inputs, keep=())[0]


def run_and_keep(
  layers: VisionLayer,
  x: jax.Array,
  config: TowerConfig,
  *inputs: Any,
  keep: tuple[int, ...],
) -> tuple[jax.Array, list[jax.Array]]:
  """Runs a stack of layers, scanned or unrolled.

  Args:
    layers: one module of stacked weights [L, ...].
    x: the input of the first layer.
    config: says how the layers run.
    inputs: further inputs of every layer.
    keep: numbers of the layers whose outputs are returned too, in increasing order.

  Returns:
    The output of the last layer, and those of the layers `keep`.
  """
  graph, state = nnx.split(layers)

  def call(state, x):
    return nnx.merge(graph, state)(x, *inputs)

  if config.remat != "none":
    call = jax.checkpoint(call, policy=REMAT_POLICIES[config.remat])
  kept: list[jax.Array] = []
  if config.scanned:

    def step(carry, xs):
      (x, kept), (state, number) = carry, xs
      x = call(state, x)
      return (x, [jnp.where(number == i, x, y) for i, y in zip(keep, kept)]), None

    numbers = jnp.arange(config.num_layers) if keep else None
    with jax.named_scope("layers"):
      return jax.lax.scan(step, (x, [x] * len(keep)), (state, numbers))[0]
  for i, one in enumerate(layer_states(state)):
    with jax.named_scope(f"layer_{i}"):
      x = call(one, x)
    kept += [x] if i in keep else []
  return x, kept
