"""Results of requests that clients may still ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import numpy as np

from tunix.tinker.learning.data import split
from tunix.utils import array_codec

Key = TypeVar("Key", bound=Hashable)

_OVERHEAD = 1024  # bytes of a result besides its arrays, about


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """The result of a request.

  Attributes:
    values: JSON values.
    arrays: arrays by name.
    error: text for people if the request failed, else None.
    category: "user" or "server", who can correct the error.
  """

  values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
  error: str | None = None
  category: str = "user"

  @classmethod
  def of(cls, meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Result:
    """Returns the result of a record that was unpacked."""
    fields = {name: meta[name] for name in ("values", "error", "category")}
    return cls(**fields, arrays=arrays)

  def record(self, **key: object) -> bytes:
    """Returns the record for a journal, with a key for the reader."""
    meta = {"type": "result", **key, "values": dict(self.values)}
    meta |= {"error": self.error, "category": self.category}
    return array_codec.to_bytes(meta, self.arrays)

  def per_row(self) -> dict[str, list[np.ndarray]]:
    """Returns the arrays with values of tokens, cut into rows or completions."""
    lengths, widths = self.arrays["lengths"], self.arrays.get("widths")
    return {
      name: split(values, lengths, widths)
      for name, values in self.arrays.items()
      if name not in ("lengths", "widths") and "prompt" not in name
    }

  @property
  def nbytes(self) -> int:
    """Bytes in memory, about."""
    return _OVERHEAD + sum(x.nbytes for x in self.arrays.values())


def start_record(count: int, **key: object) -> bytes:
  """Returns the record for a journal of the starts of a request so far."""
  return array_codec.to_bytes({"type": "start", **key, "count": count}, {})


def stopped_too_often(starts: int) -> Result:
  """Returns the result of a request that was begun too often and never ended."""
  return Result(
    error=f"the service ended {starts} times while it computed this request; expected "
    f"it to end within {starts} starts. Send a smaller request, or read the log of the "
    "server",
    category="server",
  )


class Results(Generic[Key]):
  """Results by key. Where they take too much, the oldest ones are dropped.

  A client that goes away never asks for its results, so nothing else would end them.

  Args:
    most: most bytes of all results. The newest one is kept in any case.
  """

  def __init__(self, most: int):
    self._most, self._bytes = most, 0
    self._results: dict[Key, Result] = {}

  def __setitem__(self, key: Key, result: Result) -> None:
    self.pop(key)
    self._results[key] = result
    self._bytes += result.nbytes
    while self._bytes > self._most and len(self._results) > 1:
      self.pop(next(iter(self._results)))

  def __contains__(self, key: Key) -> bool:
    return key in self._results

  def __iter__(self) -> Iterator[Key]:
    return iter(self._results)

  def __len__(self) -> int:
    return len(self._results)

  def get(self, key: Key) -> Result | None:
    """Returns a result, or None."""
    return self._results.get(key)

  def pop(self, key: Key) -> None:
    """Drops a result, if it is there."""
    result = self._results.pop(key, None)
    if result is not None:
      self._bytes -= result.nbytes

  def items(self) -> list[tuple[Key, Result]]:
    """Returns keys and results, the oldest first."""
    return list(self._results.items())
