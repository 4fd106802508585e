"""Tensors of checkpoints that are stored in MXFP4 (OCP Microscaling Formats 1.0).

A tensor X [..., in, out] is stored as `X_blocks`, uint8 [..., out, in / 32, 16], and
`X_scales`, uint8 [..., out, in / 32]. Inputs 2 i and 2 i + 1 of a block are the low and
the high 4 bits of byte i, numbers of 4 bits (E2M1). A block is multiplied by
2 ** (scale - 127). All products are exact in bfloat16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from tunix.models.files.stored_tensor import StoredTensor
from tunix.models.transformer.dense import quantized

BLOCK = 32  # inputs
_BLOCKS, _SCALES = "_blocks", "_scales"
_BIAS = 127

# The two numbers of every byte.
_PAIRS = np.array(
  [[quantized.MXFP4[byte & 15], quantized.MXFP4[byte >> 4]] for byte in range(256)],
  np.float32,
)


@dataclasses.dataclass(frozen=True)
class PackedTensor(StoredTensor):
  """A tensor that is decoded when it is read.

  Attributes:
    blocks, scales: the stored tensors.
  """

  blocks: StoredTensor = dataclasses.field(kw_only=True)
  scales: StoredTensor = dataclasses.field(kw_only=True)

  def map(self) -> _View:  # pyright: ignore[reportIncompatibleMethodOverride]
    """Returns an object whose slices are arrays of decoded numbers."""
    return _View(self.blocks.map(), self.scales.map())


@dataclasses.dataclass(frozen=True)
class _View:
  """The numbers of a packed tensor [..., in, out], decoded by slicing.

  Attributes:
    blocks, scales: the stored bytes.
  """

  blocks: np.ndarray
  scales: np.ndarray

  def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
    """Returns a slice in float32; `index` has a slice for every axis."""
    *lead, rows, columns = index
    first, last, _ = rows.indices(BLOCK * self.scales.shape[-1])
    # The blocks that hold the inputs; the ends are cut off after decoding.
    used = slice(first // BLOCK, -(-last // BLOCK))
    at = (*lead, columns, used)
    numbers = _PAIRS[self.blocks[at]].reshape(*self.scales[at].shape, BLOCK)
    exponents = self.scales[at].astype(np.int32) - _BIAS
    numbers = np.ldexp(numbers, exponents[..., None])
    numbers = numbers.reshape(*numbers.shape[:-2], -1)
    start = first - used.start * BLOCK
    return numbers[..., start : start + last - first].swapaxes(-1, -2)


def joined(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
  """Returns the tensors with each pair of blocks and scales as one `PackedTensor`.

  Args:
    tensors: the tensors of a checkpoint by name.

  Raises:
    ValueError: blocks have no scales or the reverse, or a pair has other dtypes or
      shapes than MXFP4 has.
  """
  out = dict(tensors)
  pairs = {key.removesuffix(_BLOCKS) for key in tensors if key.endswith(_BLOCKS)}
  pairs |= {key.removesuffix(_SCALES) for key in tensors if key.endswith(_SCALES)}
  for name in sorted(pairs):
    blocks, scales = out.pop(name + _BLOCKS, None), out.pop(name + _SCALES, None)
    if blocks is None or scales is None:
      missing = name + (_BLOCKS if blocks is None else _SCALES)
      raise ValueError(
        f"tensor {missing!r} is missing; expected blocks and scales of MXFP4. "
        "Download the folder again"
      )
    out[name] = _packed(name, blocks, scales)
  return out


def _packed(name: str, blocks: StoredTensor, scales: StoredTensor) -> PackedTensor:
  bytes_of_block = BLOCK // 2
  is_bytes = blocks.dtype == scales.dtype == np.uint8
  if not is_bytes or blocks.shape != (*scales.shape, bytes_of_block):
    raise ValueError(
      f"tensors {blocks.name!r} and {scales.name!r} are {blocks.dtype}{blocks.shape} "
      f"and {scales.dtype}{scales.shape}; expected uint8 of MXFP4, blocks of "
      f"{bytes_of_block} bytes and one scale each. Download the folder again"
    )
  *lead, columns, count = scales.shape
  return PackedTensor(
    name,
    blocks.file,
    np.dtype(jnp.bfloat16),
    (*lead, count * BLOCK, columns),
    blocks.offset,
    blocks=blocks,
    scales=scales,
  )
