"""Bytes of JSON values together with arrays, for journals and state files.

The form is: length of the header (uint32), the header as JSON, the arrays one after the
other in C order, little-endian. The header holds the JSON values, and name, dtype and
shape of each array.

A state file has these bytes in records (tunix/utils/record_file.py), which have
checksums. Those of earlier versions have the bytes alone.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from tunix.utils import record_file
from tunix.utils.record_file import RecordFile

_LENGTH = struct.Struct("<I")
_MOST = 2**26  # bytes of a record, whose length must fit 32 bits
_START = b'{"meta": '  # of each header


def pack(meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
  """Returns the bytes of JSON values and arrays."""
  stored = {name: np.asarray(x, order="C") for name, x in arrays.items()}
  forms = [(name, x.dtype.str, x.shape) for name, x in stored.items()]
  header = json.dumps({"meta": dict(meta), "arrays": forms}).encode()
  return b"".join(
    (_LENGTH.pack(len(header)), header, *(x.tobytes() for x in stored.values()))
  )


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Returns the JSON values and the arrays of `pack`; the arrays are read-only.

  Raises:
    ValueError: bytes are missing.
  """
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


def is_packed(data: bytes) -> bool:
  """Returns True if the beginning of some bytes may be that of `pack`."""
  return _START.startswith(data[_LENGTH.size :][: len(_START)])


def write(
  path: pathlib.Path, meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
  """Writes a state file, atomically, and waits until the disk has it."""
  data = pack(meta, arrays)
  parts = (data[i : i + _MOST] for i in range(0, len(data), _MOST))
  record_file.write(path, parts)


def read(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Returns the JSON values and the arrays of a state file, also of an earlier version.

  Raises:
    RecordError: the file is damaged.
  """
  with path.open("rb") as file:
    is_old = is_packed(file.read(_LENGTH.size + len(_START)))
  if is_old:
    data = path.read_bytes()
  else:
    with contextlib.closing(RecordFile(path, reads=True)) as file:
      data = b"".join(file.records())
  with record_file.checked(path):
    return unpack(data)
