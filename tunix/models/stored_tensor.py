"""A tensor that lies in a file, and the checks that every format's reader shares."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

MAX_JSON = 100_000_000  # bytes; the largest published index has 20 MB
_MAX_AXES = 32
_MAX_REASON = 200


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """One tensor of a file, not read yet.

  Attributes:
    name: its key. file: where it lies. offset: of its first byte.
    strides: elements between neighbours of each axis; None: row by row.
  """

  name: str
  file: pathlib.Path
  dtype: np.dtype
  shape: tuple[int, ...]
  offset: int
  strides: tuple[int, ...] | None = None

  def map(self) -> np.ndarray:
    """A read-only view of the file; bytes are read when touched."""
    if math.prod(self.shape) == 0:
      return np.empty(self.shape, self.dtype)
    if self.strides is None:
      return np.memmap(self.file, self.dtype, "r", self.offset, self.shape)
    span = 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides))
    flat = np.memmap(self.file, self.dtype, "r", self.offset, (span,))
    steps = [step * self.dtype.itemsize for step in self.strides]
    return np.lib.stride_tricks.as_strided(flat, self.shape, steps, writeable=False)


def sizes(values: Any, what: str) -> tuple[int, ...]:
  """The values as axis sizes, offsets or strides.

  Raises:
    ValueError: not a short list of whole numbers >= 0, or so large that an array of
      that shape cannot be addressed.
  """
  if not isinstance(values, (list, tuple)) or len(values) > _MAX_AXES:
    raise ValueError(f"{what} is no list of at most {_MAX_AXES} numbers")
  # True is an int to Python, and 2.0 equals one.
  if any(type(value) is not int or value < 0 for value in values):
    raise ValueError(f"{what} {brief(list(values))} are not all whole numbers >= 0")
  # Also where one axis is 0: NumPy computes the product of the others.
  if math.prod(value for value in values if value) >= 2**60:
    raise ValueError(f"{what} {brief(list(values))} is larger than any file")
  return tuple(values)


def strict_json(raw: bytes) -> Any:
  """Parses UTF-8 JSON in which no object names a key twice.

  Raises:
    ValueError: it is none; also for nesting deeper than Python's stack.
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
    raise ValueError(f"{brief(twice)} is there twice")
  return values


def brief(value: Any) -> str:
  """The value for a message: of a foreign file, so escaped and cut."""
  text = value if isinstance(value, Exception) else repr(value)
  line = " ".join(str(text).split())
  return line if len(line) <= _MAX_REASON else line[:_MAX_REASON] + "..."
