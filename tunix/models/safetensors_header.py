"""The JSON header of a safetensors file, checked before a byte is mapped.

Every tensor's bytes must be accounted for: in the order of their offsets they fill the
file without overlap or gap, so no two names share bytes and nothing hides between them.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from tunix.models.stored_tensor import StoredTensor, brief, sizes, strict_json

DTYPES: Mapping[str, Any] = {
  "F64": np.float64,
  "F32": np.float32,
  "F16": np.float16,
  "BF16": jnp.bfloat16,
  "F8_E4M3": jnp.float8_e4m3fn,
  "F8_E5M2": jnp.float8_e5m2,
  "I64": np.int64,
  "I32": np.int32,
  "I16": np.int16,
  "I8": np.int8,
  "U64": np.uint64,
  "U32": np.uint32,
  "U16": np.uint16,
  "U8": np.uint8,
  "BOOL": np.bool_,
}


def parse(
  file: pathlib.Path, raw: bytes, start: int, size: int
) -> dict[str, StoredTensor]:
  """The tensors that a header describes.

  Args:
    file: it belongs to.
    raw: the header.
    start: of the tensors' bytes in the file.
    size: of the file, in bytes.

  Raises:
    ValueError: it is no header, or not that of a file of this size.
  """
  header = strict_json(raw)
  if not isinstance(header, dict):
    raise ValueError(f"the header is {type(header).__name__}, expected an object")
  notes = header.pop("__metadata__", {})
  if not isinstance(notes, dict) or not all(
    isinstance(note, str) for note in notes.values()
  ):
    raise ValueError("__metadata__ is not an object of strings")
  tensors = {name: _tensor(file, name, entry, start) for name, entry in header.items()}
  end = start
  for tensor in sorted(tensors.values(), key=lambda t: (t.offset, _nbytes(t))):
    if tensor.offset != end:
      kind = "overlaps" if tensor.offset < end else "leaves a gap after"
      raise ValueError(f"tensor {brief(tensor.name)} {kind} the one before it")
    end += _nbytes(tensor)
  if end != size:
    raise ValueError(f"{size} bytes, {end} expected")
  return tensors


def _tensor(file: pathlib.Path, name: str, entry: Any, start: int) -> StoredTensor:
  if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(
    entry
  ):
    raise ValueError(f"tensor {brief(name)} lacks dtype, shape or data_offsets")
  code = entry["dtype"]
  if not isinstance(code, str) or code not in DTYPES:
    raise ValueError(f"tensor {brief(name)} has the unknown dtype {brief(code)}")
  dtype = np.dtype(DTYPES[code])
  shape = sizes(entry["shape"], f"tensor {brief(name)}: shape")
  offsets = sizes(entry["data_offsets"], f"tensor {brief(name)}: data_offsets")
  nbytes = math.prod(shape) * dtype.itemsize
  if len(offsets) != 2 or offsets[1] - offsets[0] != nbytes:
    raise ValueError(
      f"tensor {brief(name)} of shape {shape} and {dtype} needs {nbytes} bytes, "
      f"data_offsets are {list(offsets)}"
    )
  return StoredTensor(name, file, dtype, shape, start + offsets[0])


def _nbytes(tensor: StoredTensor) -> int:
  return math.prod(tensor.shape) * tensor.dtype.itemsize
