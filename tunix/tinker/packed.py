"""Bytes of JSON values together with arrays, for journals and state files.

The form is: length of the header (uint32), the header as JSON, the arrays one after the
other in C order, little-endian. The header holds the JSON values, and name, dtype and
shape of each array.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

_LENGTH = struct.Struct("<I")


def pack(meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
  """Returns the bytes of JSON values and arrays."""
  stored = {name: np.asarray(x, order="C") for name, x in arrays.items()}
  forms = [(name, x.dtype.str, x.shape) for name, x in stored.items()]
  header = json.dumps({"meta": dict(meta), "arrays": forms}).encode()
  return b"".join(
    (_LENGTH.pack(len(header)), header, *(x.tobytes() for x in stored.values()))
  )


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Returns the JSON values and the arrays of `pack`; the arrays are read-only."""
  (length,) = _LENGTH.unpack_from(data)
  start = _LENGTH.size + length
  header = json.loads(data[_LENGTH.size : start])
  arrays = {}
  for name, kind, shape in header["arrays"]:
    dtype = np.dtype(kind)
    count = int(np.prod(shape, dtype=np.int64))
    arrays[name] = np.frombuffer(data, dtype, count, start).reshape(shape)
    start += count * dtype.itemsize
  return header["meta"], arrays
