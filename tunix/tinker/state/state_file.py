"""State files: JSON values and arrays of a run or a checkpoint.

A file has the bytes of `array_codec.to_bytes` in records (tunix/utils/record_file.py),
which have checksums. Those of earlier versions have the bytes alone.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tunix.utils import array_codec, record_file
from tunix.utils.record_file import RecordFile

_MOST = 2**26  # bytes of a record, whose length must fit 32 bits


def write(
  path: pathlib.Path, meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
  """Writes a state file, atomically, and waits until the disk has it."""
  data = array_codec.to_bytes(meta, arrays)
  parts = (data[i : i + _MOST] for i in range(0, len(data), _MOST))
  record_file.write(path, parts)


def read(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Returns the JSON values and the arrays of a state file, also of an earlier version.

  Raises:
    RecordError: the file is damaged.
  """
  with path.open("rb") as file:
    is_old = array_codec.is_start(file.read(len(record_file.MAGIC)))
  if is_old:
    data = path.read_bytes()
  else:
    with contextlib.closing(RecordFile(path, reads=True)) as file:
      data = b"".join(file.records())
  with record_file.checked(path):
    return array_codec.from_bytes(data)
