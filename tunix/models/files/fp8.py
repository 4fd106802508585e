"""Tensors of checkpoints that are stored in FP8 with scales (arXiv:2412.19437, 3.3).

A tensor X [..., out, in] is stored in float8 (E4M3) beside `X_scale_inv`. Number (r, c)
is multiplied by scale (r // R, c // C), where R and C are the `weight_block_size` of
`config.json`: 128 and 128 if the field is missing. If it is null, there is one scale
for each matrix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from tunix.models.files.stored_tensor import StoredTensor

_SCALES = "_scale_inv"
# Scales of a layer's inputs, which are not rounded here.
_OF_INPUTS = "activation_scale"
# transformers' value of a missing `weight_block_size`.
_BLOCK = (128, 128)

# The number of every byte: looking it up is quicker than a cast by ml_dtypes.
_NUMBERS = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class ScaledTensor(StoredTensor):
  """A tensor that is decoded when it is read.

  Attributes:
    values, scales: the stored tensors.
    block: rows and columns that share a scale.
  """

  values: StoredTensor = dataclasses.field(kw_only=True)
  scales: StoredTensor = dataclasses.field(kw_only=True)
  block: tuple[int, int] = dataclasses.field(kw_only=True)

  def map(self) -> _View:  # pyright: ignore[reportIncompatibleMethodOverride]
    """Returns an object whose slices are arrays of decoded numbers."""
    grid = (*self.shape[:-2], *_grid(self.shape, self.block))
    scales = self.scales.map()
    if scales.dtype == np.uint8:  # exponents: byte b is 2 ** (b - 127)
      scales = scales.view(jnp.float8_e8m0fnu)
    return _View(self.values.map(), scales.reshape(grid), self.block)


@dataclasses.dataclass(frozen=True)
class _View:
  """The numbers of a scaled tensor [..., out, in], decoded by slicing.

  Attributes:
    values, scales: the stored numbers.
    block: see `ScaledTensor`.
  """

  values: np.ndarray
  scales: np.ndarray
  block: tuple[int, int]

  def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
    """Returns a slice in float32; `index` has a slice for every axis, of step 1."""
    *lead, rows, columns = index
    height, width = self.block
    first, last, _ = rows.indices(self.values.shape[-2])
    left, right, _ = columns.indices(self.values.shape[-1])
    scales = self.scales[(*lead, slice(None), slice(None))].astype(np.float32)
    scales = np.take(scales, np.arange(left, right) // width, -1)
    out = _NUMBERS[self.values[index].view(np.uint8)]
    for block in range(first // height, -(-last // height)):
      start, stop = max(block * height, first), min((block + 1) * height, last)
      out[..., start - first : stop - first, :] *= scales[..., block, None, :]
    return out


def joined(
  tensors: Mapping[str, StoredTensor], settings: Mapping[str, Any]
) -> dict[str, StoredTensor]:
  """Returns the tensors with numbers and their scales as one `ScaledTensor`.

  Args:
    tensors: the tensors of a checkpoint by name.
    settings: `quantization_config` of its `config.json`.

  Raises:
    ValueError: numbers have no scales or the reverse, a pair has other dtypes or shapes
      than the settings say, or the settings are not supported.
  """
  block = _block_size(settings)
  out = {key: tensor for key, tensor in tensors.items() if not key.endswith(_OF_INPUTS)}
  for key in [key for key in out if key.endswith(_SCALES)]:
    scales, name = out.pop(key), key.removesuffix(_SCALES)
    if name not in out:
      raise ValueError(
        f"tensor {name!r} is missing; expected it beside {key!r}. Download the folder "
        "again"
      )
    out[name] = _scaled(out[name], scales, block)
  for key, tensor in out.items():
    if tensor.dtype.itemsize == 1 and jnp.issubdtype(tensor.dtype, jnp.floating):
      raise ValueError(
        f"tensor {key!r} is {tensor.dtype} without scales; expected "
        f"{key + _SCALES!r} beside it. Download the folder again, or use one in "
        "bfloat16"
      )
  return out


def _block_size(settings: Mapping[str, Any]) -> tuple[int, int] | None:
  size = settings.get("weight_block_size", _BLOCK)
  if settings.get("expert_dtype", "fp8") != "fp8":
    raise ValueError(
      f"quantization_config.expert_dtype is {settings['expert_dtype']!r}; expected "
      "'fp8'. Use a folder in bfloat16"
    )
  if size is None:
    return None
  whole = isinstance(size, (list, tuple)) and len(size) == 2
  if not whole or any(type(n) is not int or n < 1 for n in size):
    raise ValueError(
      f"quantization_config.weight_block_size is {size!r}; expected two whole numbers "
      "above 0, or null for one scale a matrix"
    )
  return size[0], size[1]


def _last_axes(shape: tuple[int, ...]) -> tuple[int, int] | None:
  if len(shape) < 2 or 0 in shape:
    return None
  return shape[-2], shape[-1]


def _grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
  """Returns the number of blocks along the last two axes."""
  return -(-shape[-2] // block[0]), -(-shape[-1] // block[1])


def _scaled(
  values: StoredTensor, scales: StoredTensor, block: tuple[int, int] | None
) -> ScaledTensor:
  shape = values.shape
  matrix = _last_axes(shape)
  # A scale with no axis or with one belongs to the whole matrix, for all settings.
  is_single = scales.shape in ((), (1,))
  size = (None if is_single else block) or matrix or (1, 1)
  expected = (*shape[:-2], *_grid(shape, size)) if matrix else None
  is_fp8 = values.dtype == jnp.float8_e4m3fn
  is_fp8 &= scales.dtype == np.uint8 or jnp.issubdtype(scales.dtype, jnp.floating)
  if not is_fp8 or not (scales.shape == expected or (is_single and expected == (1, 1))):
    blocks = "one scale a matrix" if block is None else f"blocks of {block}"
    raise ValueError(
      f"tensors {values.name!r} and {scales.name!r} are {values.dtype}{shape} and "
      f"{scales.dtype}{scales.shape}; expected float8_e4m3fn matrices with {blocks}, "
      "as quantization_config says. Download the folder again"
    )
  return ScaledTensor(
    values.name,
    values.file,
    np.dtype(jnp.bfloat16),
    shape,
    values.offset,
    values=values,
    scales=scales,
    block=size,
  )
