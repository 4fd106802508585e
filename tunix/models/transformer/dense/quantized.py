"""Kernels in 4 or 8 bits: encoding, decoding and the module that stores them.

- nf4: the 16 quantiles of a normal distribution (QLoRA, Dettmers et al. 2023,
  arXiv:2305.14314, appendix E) times the largest absolute value of a block of inputs.
- int4, int8: whole numbers in +-7 or +-127, times a scale per block or per output.
- fp8: numbers of 8 bits, E4M3 (Micikevicius et al. 2022, arXiv:2209.05433), times a
  scale per output.
- mxfp4: numbers of 4 bits, E2M1, times a power of two per block of 32 inputs (OCP
  Microscaling Formats 1.0). Experts of gpt-oss are published in it.

Two 4-bit codes share a byte. qwix's `QArray` is not used, because it stores 4-bit codes
as uint4 and int4. orbax cannot save uint4, and the CPU backend gives each code a whole
byte (65,536 bytes for a [2, 256, 128] kernel, 32,768 here). The error is the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tunix.utils import checks

METHODS = ("nf4", "int4", "int8", "fp8", "mxfp4")
OF_A_BYTE = ("int8", "fp8")  # the methods whose codes take a byte each

_NF4 = (
  *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
  *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
  *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
  *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
  *(0.7229568362236023, 1.0),
)
_FP8 = jnp.float8_e4m3fn
_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# The numbers of E2M1 by code; the high bit is the sign.
MXFP4 = (*_HALF, *(-x for x in _HALF))
_TABLES = {"nf4": _NF4, "mxfp4": MXFP4}
# Scales of mxfp4 are stored as bytes: the power of two plus this number.
_MXFP4_BIAS = 127

# Largest absolute code of each method. The largest absolute number of a block is mapped
# to it. The codes -8 and -128 are unused, so that the range is symmetric around 0.
_LARGEST = {"nf4": 1.0, "int4": 7.0, "int8": 127.0, "fp8": 448.0}
# Default number of inputs that share a scale; None for all inputs of a kernel.
_BLOCKS = {"nf4": 64, "int4": 64, "int8": None, "fp8": None, "mxfp4": 32}


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
  """The storage of quantized kernels.

  Attributes:
    method: "nf4", "int4", "int8", "fp8" or "mxfp4".
    block: number of inputs that share a scale; None for 64 with nf4 and int4, 32 with
      mxfp4, and all inputs with int8 and fp8. A kernel with fewer inputs is one block.
    scale_dtype: dtype of the scales: float32, or bfloat16, which takes 0.25 bit less
      per weight in blocks of 64. It has no effect on mxfp4, whose scales are bytes.
  """

  method: str = "nf4"
  block: int | None = None
  scale_dtype: DTypeLike = jnp.float32

  def __post_init__(self):
    if self.method not in METHODS:
      raise ValueError(
        f"quantization method {self.method!r} is unknown: use one of "
        f"{', '.join(METHODS)}"
      )
    checks.fields(self, block=checks.Range(2))
    if self.block is not None and self.block % 2:
      raise ValueError(f"block is {self.block}, it must be even and at least 2")
    if not jnp.issubdtype(self.scale_dtype, jnp.floating):
      raise ValueError(f"scale_dtype is {self.scale_dtype}: use float32 or bfloat16")

  def block_of(self, rows: int) -> int:
    """Returns the number of inputs that share a scale in a kernel of `rows` inputs.

    Raises:
      ValueError: blocks do not divide the inputs, or 4-bit codes do not pair up.
    """
    block = self.block or _BLOCKS[self.method] or rows
    block = min(block, rows)
    if rows % block or (self.method not in OF_A_BYTE and rows % 2):
      raise ValueError(
        f"{rows} inputs cannot be cut into blocks of {block} for {self.method}: set "
        "another block, or leave the module out of the targets"
      )
    return block


def encode(
  kernel: jax.Array, method: str, block: int, scale_dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
  """Quantizes a kernel and returns its codes and scales.

  Args:
    kernel: the kernel [..., in, out].
    method: a name in METHODS.
    block: number of inputs that share a scale.
    scale_dtype: dtype of the scales.

  Returns:
    Codes, int8 [..., in, out] for 8 bits and uint8 [..., in / 2, out] for 4 bits; and
    scales [..., in / block, out].
  """
  *lead, rows, columns = kernel.shape
  blocks = kernel.astype(jnp.float32).reshape(*lead, rows // block, block, columns)
  if method == "mxfp4":
    return _encode_mxfp4(blocks)
  scales = jnp.max(jnp.abs(blocks), axis=-2) / _LARGEST[method]
  scales = scales.astype(scale_dtype)
  # The divisor is the scale after rounding to `scale_dtype`, because decoding
  # multiplies by that one. A block of zeros has scale 0 and is divided by 1.
  divisor = scales.astype(jnp.float32)[..., None, :]
  x = blocks / jnp.where(divisor > 0, divisor, 1.0)
  x = x.reshape(*lead, rows, columns)
  if method == "fp8":  # bytes, since a float would look like a weight to train
    x = jnp.clip(x, -_LARGEST[method], _LARGEST[method])  # E4M3 has no infinity
    return jax.lax.bitcast_convert_type(x.astype(_FP8), jnp.int8), scales
  if method == "nf4":
    table = np.asarray(_NF4, np.float32)
    # The index of the nearest entry is the number of midpoints below x. XLA fuses this
    # sum of 15 comparisons; an argmin over 16 distances would take 16 times the memory
    # of the kernel.
    codes = jnp.zeros(x.shape, jnp.uint8)
    for middle in (table[1:] + table[:-1]) / 2:
      codes = codes + (x > middle).astype(jnp.uint8)
    return _pack(codes), scales
  largest = _LARGEST[method]
  whole = jnp.clip(jnp.round(x), -largest, largest).astype(jnp.int8)
  if method == "int8":
    return whole, scales
  return _pack((whole + 8).astype(jnp.uint8)), scales  # codes 1 to 15, 8 for zero


def _encode_mxfp4(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Quantizes blocks [..., n, block, out], as the Microscaling formats define it.

  The scale is the largest power of two at most the largest absolute number, divided by
  4, which is the largest power of two of E2M1. Numbers that were decoded from mxfp4 are
  encoded without an error, also if their block was stored with a larger scale: half and
  a quarter of such a block's numbers are numbers of E2M1 too.
  """
  most = jnp.max(jnp.abs(blocks), axis=-2)
  _, exponent = jnp.frexp(most)  # most is in [2 ** (exponent - 1), 2 ** exponent)
  power = jnp.clip(exponent - 3, -_MXFP4_BIAS, _MXFP4_BIAS)
  power = jnp.where(most > 0, power, -_MXFP4_BIAS)
  x = jnp.ldexp(blocks, -power[..., None, :])
  half = np.asarray(_HALF, np.float32)
  codes = jnp.zeros(x.shape, jnp.uint8)
  # A number in the middle goes to the even code, whose last bit of the mantissa is 0.
  for i, middle in enumerate((half[1:] + half[:-1]) / 2):
    above = jnp.abs(x) >= middle if i % 2 else jnp.abs(x) > middle
    codes = codes + above.astype(jnp.uint8)
  codes = codes | ((x < 0).astype(jnp.uint8) << 3)
  *lead, count, block, columns = x.shape
  packed = _pack(codes.reshape(*lead, count * block, columns))
  return packed, (power + _MXFP4_BIAS).astype(jnp.uint8)


def decode(
  codes: jax.Array, scales: jax.Array, method: str, dtype: DTypeLike
) -> jax.Array:
  """Returns the kernel [..., in, out] of codes and scales that `encode` returned."""
  values = values_of(codes, method).astype(jnp.float32)
  if method == "mxfp4":
    scales = jnp.ldexp(jnp.float32(1), scales.astype(jnp.int32) - _MXFP4_BIAS)
  *lead, columns = (*values.shape[:-2], values.shape[-1])
  blocks = values.reshape(*lead, scales.shape[-2], -1, columns)
  blocks = blocks * scales.astype(jnp.float32)[..., None, :]
  return blocks.reshape(values.shape).astype(dtype)


def values_of(codes: jax.Array, method: str) -> jax.Array:
  """Returns the numbers [..., in, out] that codes stand for, without their scales."""
  if method == "int8":
    return codes
  if method == "fp8":
    return jax.lax.bitcast_convert_type(codes, _FP8)
  if method == "int4":
    return _unpack(codes).astype(jnp.float32) - 8.0
  return jnp.asarray(_TABLES[method], jnp.float32)[_unpack(codes)]


def _pack(codes: jax.Array) -> jax.Array:
  """Packs inputs 2 i and 2 i + 1 into byte i, the first in the low 4 bits.

  Neighboring inputs share a byte, so a contiguous shard of the inputs is a contiguous
  shard of the bytes.
  """
  return codes[..., 0::2, :] | (codes[..., 1::2, :] << 4)


def _unpack(codes: jax.Array) -> jax.Array:
  """Returns the codes of all inputs, [..., in, out], from the bytes of `_pack`."""
  pairs = jnp.stack([codes & 15, codes >> 4], axis=-2)
  return pairs.reshape(*codes.shape[:-2], -1, codes.shape[-1])


class QuantizedKernel(nnx.Module):
  """The kernel of a quantized `Linear`, which is never trained.

  Attributes:
    codes, scales: see `encode`.
    method: a name in METHODS.
    dtype: dtype of the original kernel, and of the dequantized one.
  """

  def __init__(
    self, codes: nnx.Param, scales: nnx.Param, *, method: str, dtype: DTypeLike
  ):
    self.codes = codes
    self.scales = scales
    self.method = method
    self.dtype = jnp.dtype(dtype)

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the dequantized kernel, [*stack, in, out]."""
    *lead, rows, columns = self.codes.shape
    return (*lead, rows if self.method in OF_A_BYTE else 2 * rows, columns)

  @property
  def config(self) -> QuantizationConfig:
    """The configuration that stores a kernel as this one is stored."""
    blocks = self.scales.shape[-2]
    # One block of 8 bits is the default, which takes an odd number of inputs too.
    is_default = blocks == 1 and self.method in OF_A_BYTE
    block = None if is_default else self.shape[-2] // blocks
    # Scales of mxfp4 are bytes, which its configuration does not name.
    is_float = jnp.issubdtype(self.scales.dtype, jnp.floating)
    options = {"scale_dtype": self.scales.dtype} if is_float else {}
    return QuantizationConfig(method=self.method, block=block, **options)

  def get_metadata(self, name: str | None = None) -> Any:
    """Returns the codes' metadata; `out_sharding` has an entry per kernel axis."""
    return self.codes.get_metadata() if name is None else self.codes.get_metadata(name)

  def __getitem__(self, _: object) -> jax.Array:
    """Returns the whole kernel, dequantized; the index is ignored."""
    return decode(self.codes[...], self.scales[...], self.method, self.dtype)

  def product(
    self,
    x: jax.Array,
    product: Callable[[jax.Array, jax.Array], jax.Array],
    spread: Callable[[jax.Array], jax.Array],
  ) -> jax.Array:
    """Returns product(x, kernel).

    The backward pass dequantizes again. Kernels kept from the forward pass would take
    the memory of all layers at full size.

    Args:
      x: the input.
      product: multiplies the input by a matrix.
      spread: broadcasts vectors [..., out] to the rows of the output.
    """
    method = self.method
    # A scale of an output can multiply the output: the codes are exact in 16 bits, so
    # that a compiler can read them in the product itself. Sums of codes overflow in
    # float16.
    is_late = method in OF_A_BYTE and self.scales.shape[-2] == 1
    is_late = is_late and x.dtype != jnp.float16

    @jax.checkpoint
    def run(x, codes, scales):
      if is_late:
        y = product(x, values_of(codes, method).astype(x.dtype))
        return (y * spread(scales[..., 0, :])).astype(x.dtype)
      return product(x, decode(codes, scales, method, x.dtype))

    return run(x, self.codes[...], self.scales[...])
