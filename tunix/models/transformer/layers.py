"""Linear, RMSNorm, Embedding and the gated MLP: layers that take values, not configs.

Weights may carry a leading layer axis L (`stack`): a stacked module holds the weights
of all layers, and running it needs one layer's slice (see model.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

# Standard deviation of freshly drawn weights, as in the checkpoints' own configs.
INIT_STDDEV = 0.02

Stack = tuple[int, ...]

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
  "silu": jax.nn.silu,
  "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
  "gelu": functools.partial(jax.nn.gelu, approximate=False),
}


def param(value: jax.Array, spec: tuple[Any, ...]) -> nnx.Param:
  """A parameter that remembers its PartitionSpec and is not placed when built."""
  return nnx.Param(value, out_sharding=spec, eager_sharding=False)


@functools.partial(jax.jit, static_argnums=1)
def fresh(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Newly drawn float32 weights: the same bits inside a larger jit and outside."""
  return jax.random.normal(key, shape, jnp.float32) * INIT_STDDEV


class Linear(nnx.Module):
  """y = x @ kernel (+ bias) (+ scale * x @ lora_a @ lora_b).

  Attributes:
    kernel: [*stack, in, out].
    bias: [*stack, out] or None.
    lora_a, lora_b: [*stack, in, r] and [*stack, r, out] once adapted, else None.
    lora_scale: alpha / r.
  """

  def __init__(
    self,
    in_dim: int,
    out_dim: int,
    *,
    stack: Stack = (),
    spec: tuple[Any, ...],
    use_bias: bool = False,
    param_dtype: DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
  ):
    shape = (*stack, in_dim, out_dim)
    self.kernel = param(fresh(rngs.params(), shape).astype(param_dtype), spec)
    bias = jnp.zeros((*stack, out_dim), param_dtype)
    bias_spec = (*spec[: len(stack)], spec[-1])
    self.bias = nnx.data(param(bias, bias_spec) if use_bias else None)
    self.lora_a = nnx.data(None)
    self.lora_b = nnx.data(None)
    self.lora_scale = 1.0

  def __call__(self, x: jax.Array) -> jax.Array:
    # An einsum, not `@`: qwix intercepts it where it can still add its parameters.
    y = jnp.einsum("...i,io->...o", x, self.kernel[...].astype(x.dtype))
    if self.bias is not None:
      y = y + self.bias[...].astype(x.dtype)
    if self.lora_a is not None and self.lora_b is not None:
      low = x @ self.lora_a[...].astype(x.dtype)
      y = y + (low @ self.lora_b[...].astype(x.dtype)) * self.lora_scale
    return y

  def per_expert(self, x: jax.Array) -> jax.Array:
    """[E, ..., in] -> [E, ..., out] by kernels [E, in, out]."""
    return jnp.einsum("e...i,eio->e...o", x, self.kernel[...].astype(x.dtype))

  def grouped(self, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """[M, in] -> [M, out], rows sorted by expert, `group_sizes` [E] rows of each."""
    return jax.lax.ragged_dot(x, self.kernel[...].astype(x.dtype), group_sizes)


class RMSNorm(nnx.Module):
  """x / rms(x) * (offset + scale), in float32 (Zhang and Sennrich 2019)."""

  def __init__(
    self,
    dim: int,
    eps: float,
    *,
    offset: float = 0.0,
    stack: Stack = (),
    spec: tuple[Any, ...],
    param_dtype: DTypeLike = jnp.float32,
  ):
    self.scale = param(jnp.full((*stack, dim), 1.0 - offset, param_dtype), spec)
    self.eps = eps
    self.offset = offset

  def __call__(self, x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
    scale = self.scale[...].astype(jnp.float32)
    return (y * (scale + self.offset)).astype(x.dtype)


class Embedding(nnx.Module):
  """Token embedding table [V, D]; rows are multiplied by `scale`."""

  def __init__(
    self,
    vocab_size: int,
    dim: int,
    *,
    spec: tuple[Any, ...],
    scale: float | None = None,
    param_dtype: DTypeLike = jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.scale = scale
    draw = fresh(rngs.params(), (vocab_size, dim))
    self.embedding = param(draw.astype(param_dtype), spec)

  def __call__(self, tokens: jax.Array, dtype: DTypeLike) -> jax.Array:
    x = self.embedding[...][tokens].astype(dtype)
    # The factor in the compute dtype, as the checkpoints were trained with it.
    return x if self.scale is None else x * jnp.asarray(self.scale, dtype)


class GatedMLP(nnx.Module):
  """down(activation(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202)."""

  def __init__(
    self,
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
  ):
    self.gate_proj = gate_proj
    self.up_proj = up_proj
    self.down_proj = down_proj
    self.activation = activation

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
