"""Values with NumPy arrays as JSON. Arrays keep every bit.

An array is compressed (zlib) and written as base64.
"""

from __future__ import annotations

import base64
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


def decoded(value: Any) -> Any:
  """Returns the value of `encoded`."""
  if isinstance(value, dict):
    if _ARRAY in value:
      kind, shape, text = value[_ARRAY]
      data = zlib.decompress(base64.b64decode(text))
      return np.frombuffer(data, np.dtype(kind)).reshape(shape).copy()
    return {name: decoded(x) for name, x in value.items()}
  return [decoded(x) for x in value] if isinstance(value, list) else value
