"""Values with NumPy arrays as JSON. Arrays keep every bit.

An array is compressed (zlib) and written as base64.
"""

from __future__ import annotations

import base64
import math
import zlib
from typing import Any

import numpy as np

_ARRAY = "__array__"


def encoded(value: Any) -> Any:
  """Returns a value as JSON: arrays inside mappings, lists and tuples are encoded.

  NumPy scalars become Python numbers, and tuples become lists.
  """
  if isinstance(value, np.ndarray):
    data = zlib.compress(np.ascontiguousarray(value).tobytes(), 1)
    text = base64.b64encode(data).decode()
    return {_ARRAY: [value.dtype.str, list(value.shape), text]}
  if isinstance(value, np.generic):
    return value.item()
  if isinstance(value, dict) or hasattr(value, "items"):
    return {name: encoded(x) for name, x in value.items()}
  if isinstance(value, (list, tuple)):
    return [encoded(x) for x in value]
  return value


def decoded(value: Any, most_bytes: int | None = None) -> Any:
  """Returns the value of `encoded`.

  Args:
    value: the JSON.
    most_bytes: most bytes of all arrays together; None: no limit.

  Raises:
    ValueError: the bytes of an array do not fit its shape, or the arrays are too large.
  """
  return _decoded(value, _Budget(most_bytes))


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


def _decoded(value: Any, budget: _Budget) -> Any:
  if isinstance(value, dict):
    if _ARRAY in value:
      kind, shape, text = value[_ARRAY]
      return _array(kind, shape, text, budget)
    return {name: _decoded(x, budget) for name, x in value.items()}
  return [_decoded(x, budget) for x in value] if isinstance(value, list) else value


def _array(kind: str, shape: list[int], text: str, budget: _Budget) -> np.ndarray:
  dtype = np.dtype(kind)
  size = math.prod(shape) * dtype.itemsize
  if any(n < 0 for n in shape):
    raise ValueError(f"an array has the shape {shape}; expected no negative size")
  budget.take(size)
  # A few bytes may expand to a thousand times as many: the shape bounds them.
  stream = zlib.decompressobj()
  data = stream.decompress(base64.b64decode(text), size + 1)
  if len(data) != size or not stream.eof:
    raise ValueError(
      f"the bytes of an array do not fit its shape {shape}; expected {size} bytes"
    )
  return np.frombuffer(data, dtype).reshape(shape).copy()
