"""The layers Linear, RMSNorm and Embedding, which take sizes, not configs.

Weights may have a leading layer axis L (`stack`). A stacked module holds the weights of
all layers, and only the slice of one layer can be called (see transformer/model.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tunix.models.transformer.dense import cpu_products, dropout, qwix_seam
from tunix.models.transformer.dense.cpu_products import TransposedKernel
from tunix.models.transformer.dense.quantized import QuantizedKernel
from tunix.models.transformer.token_rows import TokenRows
from tunix.ops.vocabulary import invariant

# Standard deviation of freshly drawn weights, as in the checkpoints' own configs.
INIT_STDDEV = 0.02

Stack = tuple[int, ...]
Product = Callable[[jax.Array, jax.Array], jax.Array]
Spread = Callable[[jax.Array], jax.Array]


def gelu_tanh(x: jax.Array) -> jax.Array:
  """Returns the tanh form of GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415).

  It is x/2 (1 + tanh u) = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3). In
  float32, 1 + tanh u of `jax.nn.gelu` loses its digits where u < -2, and the gradient
  there was wrong by up to 0.3 %.
  """
  u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
  return x * jax.nn.sigmoid(2 * u)


ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
  "silu": jax.nn.silu,
  "gelu_tanh": gelu_tanh,
  "gelu": functools.partial(jax.nn.gelu, approximate=False),
  "relu2": lambda x: jnp.square(jax.nn.relu(x)),  # So et al. 2021, arXiv:2109.08668
}


class FrozenParam(nnx.Param):
  """A parameter that a trainer neither trains nor saves."""


def param(value: jax.Array, spec: tuple[Any, ...]) -> nnx.Param:
  """Makes a parameter that stores its PartitionSpec and is not moved to a mesh yet."""
  return nnx.Param(value, out_sharding=spec, eager_sharding=False)


@functools.partial(jax.jit, static_argnums=1)
def fresh(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Draws float32 weights, with the same bits inside a larger jit and outside."""
  return jax.random.normal(key, shape, jnp.float32) * INIT_STDDEV


class Linear(nnx.Module):
  """A linear map y = x @ kernel (+ bias), optionally with a low-rank adapter.

  With experts the kernel is [*stack, E, in, out], and a slice of the stack is called
  through `grouped` or `per_expert`. The adapter adds scale * dropout(x) A B. With
  magnitudes m (DoRA, Liu et al. 2024, arXiv:2402.09353) the sum is multiplied by
  m / ||W + scale A B|| per output; the gradient treats the norm as a constant. Dropout
  applies to A's input only. It is off until `train()` is called.

  Attributes:
    kernel: a parameter [*stack, in, out], or a `QuantizedKernel`; while tokens are
      generated on a CPU, a `TransposedKernel`.
    bias: [*stack, out] or None.
    lora_a, lora_b: factors [*stack, in, r] and [*stack, r, out] of the adapter, or
      None.
    lora_magnitude: [*stack, out] or None; 0 marks an output without an adapter.
    lora_scale: alpha / r, or alpha / sqrt(r) if `lora_rslora`.
    lora_dropout: probability that an element of A's input is dropped.
    lora_rng: state of the dropout masks (see dropout.py), or None.
    deterministic: True if dropout is off; set by `train()` and `eval()`.
    added: a map [..., in] to [..., out] whose output is added to y, or None. The engine
      sets it while it traces (see generate/engine/device/adapters.py).
    is_module: False if the kernel is a parameter of another module in transformers, so
      that PEFT has no adapter for it.
    invariant: if True, a row's bits do not depend on other rows, see
      `TransformerConfig.batch_invariant`.
  """

  is_module = True

  def __init__(
    self,
    in_dim: int,
    out_dim: int,
    *,
    stack: Stack = (),
    spec: tuple[Any, ...],
    use_bias: bool = False,
    param_dtype: DTypeLike = jnp.float32,
    invariant: bool = False,
    rngs: nnx.Rngs,
  ):
    self.invariant = invariant
    shape = (*stack, in_dim, out_dim)
    self.kernel: nnx.Param | QuantizedKernel | TransposedKernel = nnx.data(
      param(fresh(rngs.params(), shape).astype(param_dtype), spec)
    )
    bias = jnp.zeros((*stack, out_dim), param_dtype)
    bias_spec = (*spec[: len(stack)], spec[-1])
    self.bias = nnx.data(param(bias, bias_spec) if use_bias else None)
    self.lora_a: nnx.LoRAParam | None = nnx.data(None)
    self.lora_b: nnx.LoRAParam | None = nnx.data(None)
    self.lora_magnitude: nnx.LoRAParam | None = nnx.data(None)
    self.lora_rng: nnx.RngState | None = nnx.data(None)
    self.lora_scale = 1.0
    self.lora_dropout = 0.0
    self.lora_rslora = False
    self.deterministic = True
    self.added: Spread | None = nnx.data(None)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [..., in] to [..., out]."""
    if self.invariant and not qwix_seam.is_wrapped(self):
      return self._apply(x, cpu_products.invariant_product, lambda v: v)
    einsum = self._einsum()
    return self._apply(x, lambda x, w: einsum("...i,io->...o", x, w), lambda v: v)

  @property
  def can_be_invariant(self) -> bool:
    """True without a quantized kernel, DoRA and qwix, whose bits were not compared."""
    is_other = isinstance(self.kernel, QuantizedKernel) or qwix_seam.is_wrapped(self)
    return not is_other and self.lora_magnitude is None

  def _einsum(self) -> Callable[[str, jax.Array, jax.Array], jax.Array]:
    # qwix intercepts einsums (and not `@`) where it can add its parameters.
    return jnp.einsum if qwix_seam.is_wrapped(self) else cpu_products.einsum

  def grouped(self, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Maps rows sorted by expert, [M, in] to [M, out].

    Args:
      x: rows, of which the first `group_sizes[0]` belong to expert 0, and so on.
      group_sizes: number of rows per expert, int32 [E], with the sum M.
    """
    return self._apply(
      x,
      lambda x, w: jax.lax.ragged_dot(x, w, group_sizes),
      lambda v: jnp.repeat(v, group_sizes, axis=0, total_repeat_length=x.shape[0]),
    )

  def per_expert(self, x: jax.Array) -> jax.Array:
    """Maps rows per expert, [E, ..., in] to [E, ..., out]."""
    einsum = self._einsum()
    return self._apply(
      x,
      lambda x, w: einsum("e...i,eio->e...o", x, w),
      lambda v: v.reshape(v.shape[0], *(1,) * (x.ndim - 2), v.shape[-1]),
    )

  def _apply(self, x: jax.Array, product: Product, spread: Spread) -> jax.Array:
    """Applies kernel, adapter and bias.

    Args:
      x: the input.
      product: multiplies the input by a matrix.
      spread: broadcasts vectors [..., out] to the rows of the output.
    """
    if isinstance(self.kernel, QuantizedKernel):
      y = self.kernel.product(x, product, spread)
    elif isinstance(self.kernel, TransposedKernel):
      y = self.kernel.product(x, product, self.invariant)
    else:
      y = product(x, self.kernel[...].astype(x.dtype))
    if self.lora_a is not None and self.lora_b is not None:
      a, b = self.lora_a[...], self.lora_b[...]
      low = product(self._dropped(x), a.astype(x.dtype))
      low = product(low, b.astype(x.dtype)) * self.lora_scale
      y = y + invariant.kept(low, self.invariant)
      if self.lora_magnitude is not None:
        y = invariant.kept(y, self.invariant) * spread(
          self._magnitude_ratio(a, b)
        ).astype(x.dtype)
        y = invariant.kept(y, self.invariant)
    if self.added is not None:
      y = y + self.added(x)
    if self.bias is not None:
      y = y + spread(self.bias[...]).astype(x.dtype)
    return invariant.kept(y, self.invariant)

  def _dropped(self, x: jax.Array) -> jax.Array:
    if self.deterministic or not self.lora_dropout or self.lora_rng is None:
      return x
    return dropout.apply(x, self.lora_rng[...], self.lora_dropout)

  def _magnitude_ratio(self, a: jax.Array, b: jax.Array) -> jax.Array:
    assert self.lora_magnitude is not None
    w, a, b = jax.lax.stop_gradient((self.dense(), a, b))
    return magnitude_ratio(
      self.lora_magnitude[...], column_norms(w, a, b, self.lora_scale)
    )

  @property
  def stored(self) -> nnx.Param | QuantizedKernel:
    """The kernel as it is saved; a model that only decodes may have another form."""
    assert not isinstance(self.kernel, TransposedKernel)
    return self.kernel

  def dense(self) -> jax.Array:
    """Returns the kernel as an array, dequantized if it is quantized."""
    return self.kernel[...]


def column_norms(
  kernel: jax.Array, a: jax.Array, b: jax.Array, scale: float
) -> jax.Array:
  """Returns ||W + scale A B|| over the input axis, float32 [..., out].

  It is computed as ||W||^2 + 2 scale <W, A B> + scale^2 ||A B||^2, whose parts need no
  [in, out] product and so no memory of the kernel's size.
  """
  w, a, b = (x.astype(jnp.float32) for x in (kernel, a, b))
  dot = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
  cross = jnp.sum(dot(a.mT, w) * b, axis=-2)
  square = jnp.sum(dot(dot(a.mT, a), b) * b, axis=-2)
  total = jnp.sum(w * w, axis=-2) + 2 * scale * cross + scale**2 * square
  return jnp.sqrt(jnp.maximum(total, 0.0))


def magnitude_ratio(magnitude: jax.Array, norms: jax.Array) -> jax.Array:
  """Returns magnitude / norm, and 1 where the magnitude is 0.

  A magnitude of 0 marks an output without an adapter, which stays unchanged and whose
  magnitude gets no gradient.
  """
  used = magnitude != 0
  return jnp.where(used, magnitude / jnp.where(used & (norms > 0), norms, 1.0), 1.0)


def recomputed(fn: Callable[..., jax.Array], *args: jax.Array) -> jax.Array:
  """Returns fn(*args), whose intermediate values the backward pass computes again.

  It is for elementwise functions and norms of 16-bit arrays. JAX keeps their values,
  many of them in float32, until the backward pass. To read `args` and compute again
  costs no more than to read these values. Values of float32 arrays are kept.
  """
  if args[0].dtype.itemsize >= 4:
    return fn(*args)
  # Without barriers against common subexpressions, which would also hinder fusion. The
  # backward pass of scanned layers is another loop, so there are none.
  return jax.checkpoint(fn, prevent_cse=False)(*args)


def unit_rms(x: jax.Array, eps: float, is_invariant: bool = False) -> jax.Array:
  """Returns x / sqrt(mean(x^2) + eps) over the last axis, in float32.

  With `is_invariant`, a row's bits do not depend on other rows, on a CPU.
  """
  y = x.astype(jnp.float32)
  if is_invariant:
    mean = (invariant.total(y * y) / y.shape[-1])[..., None]
  else:
    mean = jnp.mean(y * y, axis=-1, keepdims=True)
  return y * jax.lax.rsqrt(mean + eps)


class RMSNorm(nnx.Module):
  """The norm x / rms(x) * (offset + scale) in float32 (Zhang and Sennrich 2019)."""

  def __init__(
    self,
    dim: int,
    eps: float,
    *,
    offset: float = 0.0,
    stack: Stack = (),
    spec: tuple[Any, ...],
    param_dtype: DTypeLike = jnp.float32,
    invariant: bool = False,
  ):
    self.invariant = invariant
    self.scale = param(jnp.full((*stack, dim), 1.0 - offset, param_dtype), spec)
    self.eps = eps
    self.offset = offset

  def __call__(self, x: jax.Array) -> jax.Array:
    out = recomputed(self._normed, x, self.scale[...])
    return invariant.kept(out, self.invariant)

  def _normed(self, x: jax.Array, scale: jax.Array) -> jax.Array:
    factor = scale.astype(jnp.float32) + self.offset
    return (unit_rms(x, self.eps, self.invariant) * factor).astype(x.dtype)


class Embedding(nnx.Module):
  """An embedding table [V, D]; looked-up rows are multiplied by `scale` if given."""

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

  def __call__(
    self, tokens: jax.Array, dtype: DTypeLike, rows: TokenRows | None = None
  ) -> jax.Array:
    """Looks up tokens; `rows` replace some of the table's."""
    x = cpu_products.take(self.embedding[...], tokens).astype(dtype)
    if rows is not None:
      x = rows.looked_up(x, tokens, self.embedding[...].dtype)
    # The factor is rounded to the compute dtype, as in the training of the checkpoints.
    return x if self.scale is None else x * jnp.asarray(self.scale, dtype)
