"""Tensors stored in a file, and the checks that the readers of all formats share."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

MAX_JSON = 100_000_000  # bytes; the largest published index has 20 MB
_MAX_AXES = 32
_MAX_REASON = 200  # characters of a foreign file in a message

# Safetensors' codes of the dtypes. torch's names of them are "torch." and NumPy's name.
DTYPES: Mapping[str, np.dtype] = {
  "F64": np.dtype(np.float64),
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(jnp.bfloat16),
  "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
  "F8_E5M2": np.dtype(jnp.float8_e5m2),
  "F8_E8M0": np.dtype(jnp.float8_e8m0fnu),
  "I64": np.dtype(np.int64),
  "I32": np.dtype(np.int32),
  "I16": np.dtype(np.int16),
  "I8": np.dtype(np.int8),
  "U64": np.dtype(np.uint64),
  "U32": np.dtype(np.uint32),
  "U16": np.dtype(np.uint16),
  "U8": np.dtype(np.uint8),
  "BOOL": np.dtype(np.bool_),
}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """One tensor of a file, not read yet.

  Attributes:
    name: its key in the file.
    file: the file.
    dtype, shape: those of the stored numbers.
    offset: position of its first byte in the file.
    strides: distance in elements between neighbors along each axis; None for
      contiguous rows (C order).
  """

  name: str
  file: pathlib.Path
  dtype: np.dtype
  shape: tuple[int, ...]
  offset: int
  strides: tuple[int, ...] | None = None

  @property
  def nbytes(self) -> int:
    """Size of the elements in bytes."""
    return math.prod(self.shape) * self.dtype.itemsize

  def map(self) -> np.ndarray:
    """Returns a read-only view of the file; bytes are read from disk on access."""
    if self.nbytes == 0:  # nothing can be mapped
      return np.empty(self.shape, self.dtype)
    if self.strides is None:
      return np.memmap(self.file, self.dtype, "r", self.offset, self.shape)
    span = 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides))
    flat = np.memmap(self.file, self.dtype, "r", self.offset, (span,))
    steps = [step * self.dtype.itemsize for step in self.strides]
    return np.lib.stride_tricks.as_strided(flat, self.shape, steps, writeable=False)


def check_file(path: pathlib.Path) -> None:
  """Refuses a path that exists and is no file.

  Raises:
    ValueError: the path is a folder or a device.
  """
  if path.exists() and not path.is_file():
    raise ValueError(f"{path} is a folder or a device, expected a file")


def sizes(values: object, what: str) -> tuple[int, ...]:
  """Returns axis sizes, offsets or strides of a foreign file as a tuple.

  Args:
    values: the value that was read.
    what: name of the value, for messages.

  Raises:
    ValueError: `values` is no list of at most 32 whole numbers >= 0, or an array of
      that shape cannot be addressed.
  """
  if not isinstance(values, (list, tuple)) or len(values) > _MAX_AXES:
    raise ValueError(f"{what} is no list of at most {_MAX_AXES} numbers")
  # The exact type is compared, because True is an int in Python, and 2.0 == 2.
  if any(type(value) is not int or value < 0 for value in values):
    raise ValueError(f"{what} {brief(list(values))} are not all whole numbers >= 0")
  # Axes of size 0 are left out, because NumPy multiplies the other sizes even then.
  if math.prod(value for value in values if value) >= 2**60:
    raise ValueError(f"{what} {brief(list(values))} is larger than any file")
  return tuple(values)


def strict_json(raw: bytes) -> Any:
  """Parses UTF-8 JSON in which no object names a key twice.

  Raises:
    ValueError: the bytes are not such JSON, or are nested deeper than Python's stack.
  """
  try:
    return json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
  except RecursionError as error:
    raise ValueError("it is nested too deep") from error


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
  values = dict(pairs)
  if len(values) < len(pairs):
    seen: set[str] = set()
    twice = next(key for key, _ in pairs if key in seen or seen.add(key))
    raise ValueError(f"{brief(twice)} occurs twice")
  return values


def brief(value: object, most: int = _MAX_REASON) -> str:
  """Returns a value of a foreign file for a message, escaped and cut to one line.

  Args:
    value: the value, or an error that names one.
    most: largest number of characters.
  """
  text = value if isinstance(value, Exception) else repr(value)
  line = " ".join(str(text).split())
  return line if len(line) <= most else line[:most] + "..."
