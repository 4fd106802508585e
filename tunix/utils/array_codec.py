"""Values with NumPy arrays as JSON or as bytes. Arrays keep every bit.

In JSON, the bytes of an array are compressed (zlib) and written as base64.

The other form is for files: length of the header (uint32), the header as JSON, the
arrays one after the other in C order, little-endian. The header holds JSON values, and
name, dtype and shape of each array.
"""

from __future__ import annotations

import base64
import json
import math
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

_ARRAY = "__array__"
_LENGTH = struct.Struct("<I")
_START = b'{"meta": '  # of each header


def to_json(value: Any) -> Any:
  """Returns a value as JSON: arrays inside mappings, lists and tuples are encoded.

  NumPy scalars become Python numbers, and tuples become lists.
  """
  if isinstance(value, np.ndarray):
    data = zlib.compress(np.ascontiguousarray(value).tobytes(), 1)
    return {_ARRAY: [*_form(value), base64.b64encode(data).decode()]}
  if isinstance(value, np.generic):
    return value.item()
  if isinstance(value, dict) or hasattr(value, "items"):
    return {name: to_json(x) for name, x in value.items()}
  if isinstance(value, (list, tuple)):
    return [to_json(x) for x in value]
  return value


def as_python(value: Any) -> Any:
  """Returns an array as nested lists, and a scalar of an array library as a number.

  Other values are returned unchanged. Arrays are those of any library with the method
  `tolist`: NumPy, JAX and torch.
  """
  return value.tolist() if hasattr(value, "tolist") else value


def from_json(value: object, most_bytes: int | None = None) -> Any:
  """Returns the value of `to_json`.

  Args:
    value: the JSON.
    most_bytes: most bytes of all arrays together; None: no limit.

  Raises:
    ValueError: the bytes of an array do not fit its shape, or the arrays are too large.
  """
  return _decoded(value, _Budget(most_bytes))


def to_bytes(meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
  """Returns the bytes of JSON values and arrays."""
  stored = {name: np.asarray(x, order="C") for name, x in arrays.items()}
  forms = [(name, *_form(x)) for name, x in stored.items()]
  header = json.dumps({"meta": dict(meta), "arrays": forms}).encode()
  return b"".join(
    (_LENGTH.pack(len(header)), header, *(x.tobytes() for x in stored.values()))
  )


def from_bytes(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Returns the JSON values and the arrays of `to_bytes`; the arrays are read-only.

  Raises:
    ValueError, struct.error: bytes are missing.
  """
  (length,) = _LENGTH.unpack_from(data)
  start = _LENGTH.size + length
  header = json.loads(data[_LENGTH.size : start])
  arrays = {}
  for name, kind, shape in header["arrays"]:
    size = _size(kind, shape)
    arrays[name] = _array(kind, shape, memoryview(data)[start : start + size])
    start += size
  return header["meta"], arrays


def is_start(data: bytes) -> bool:
  """Returns True if some bytes may be the beginning of those of `to_bytes`."""
  return _START.startswith(data[_LENGTH.size :][: len(_START)])


class _Budget:
  """The bytes that arrays may still have."""

  def __init__(self, most: int | None):
    self._most, self._left = most, math.inf if most is None else most

  def take(self, size: int) -> None:
    self._left -= size
    if self._left < 0:
      raise ValueError(
        f"the arrays have more than {self._most} bytes: send fewer at once"
      )


def _decoded(value: object, budget: _Budget) -> Any:
  if isinstance(value, dict):
    if _ARRAY in value:
      kind, shape, text = value[_ARRAY]
      budget.take(size := _size(kind, shape))
      # A few bytes may expand to a thousand times as many: the shape bounds them.
      stream = zlib.decompressobj()
      data = stream.decompress(base64.b64decode(text), size + 1)
      return _array(kind, shape, data, is_whole=stream.eof).copy()
    return {name: _decoded(x, budget) for name, x in value.items()}
  return [_decoded(x, budget) for x in value] if isinstance(value, list) else value


def _form(array: np.ndarray) -> tuple[str, list[int]]:
  return array.dtype.str, list(array.shape)


def _size(kind: str, shape: list[int]) -> int:
  """Returns the bytes of an array."""
  if any(n < 0 for n in shape):
    raise ValueError(f"an array has the shape {shape}; expected no negative size")
  return math.prod(shape) * np.dtype(kind).itemsize


def _array(
  kind: str, shape: list[int], data: bytes | memoryview, *, is_whole: bool = True
) -> np.ndarray:
  size = _size(kind, shape)
  if len(data) != size or not is_whole:
    raise ValueError(
      f"the bytes of an array do not fit its shape {shape}; expected {size} bytes"
    )
  return np.frombuffer(data, np.dtype(kind)).reshape(shape)
