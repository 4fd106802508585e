"""JSON lines on disk as a sequence of records."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from tunix.data.records import Kind, Record
from tunix.data.stored import FileRecords, place

__all__ = ["JsonlRecords", "parsed", "place"]


class JsonlRecords(FileRecords):
  """The records of a JSON-lines file; blank lines are skipped."""

  noun = "JSON lines"

  def _index(self) -> str:
    offsets, lines, digest, position = [], [], hashlib.sha256(), 0
    with self.path.open("rb") as file:
      for number, line in enumerate(file, start=1):
        if line.strip():
          offsets.append(position)
          lines.append(number)
        position += len(line)
        digest.update(line)
    self._offsets = np.asarray(offsets, np.int64)
    self._lines = np.asarray(lines, np.int64)
    return digest.hexdigest()

  def __len__(self) -> int:
    return len(self._lines)

  def where(self, index: int) -> str:
    """The place of a record, as `file:line` with lines counted from 1."""
    return f"{self.name}:{self._lines[index]}"

  def raw(self, index: int) -> Any:
    """See the base class."""
    with self.opened() as file:
      file.seek(int(self._offsets[index]))
      line = file.readline()
    return parsed(line, self.where(index), self.kind)

  def checked(self) -> Iterator[tuple[dict[str, Any], Record]]:
    """See the base class; the file is opened once."""
    with self.path.open("rb") as file:
      for index, line in enumerate(line for line in file if line.strip()):
        where = self.where(index)
        record = parsed(line, where, self.kind)
        yield record, self.kind.read(record, where)


def parsed(text: bytes, where: str, kind: Kind, one: str = "a line") -> Any:
  """A record of JSON; `one` says where each object stands, for the message.

  Raises:
    ValueError: it is none; begins with `where`.
  """
  try:
    return json.loads(text)
  except (json.JSONDecodeError, UnicodeDecodeError) as error:
    raise ValueError(
      f"{where}: invalid JSON ({error}); {kind.expected}, one object {one}"
    ) from error
  except RecursionError as error:
    raise ValueError(
      f"{where}: the JSON is nested too deeply; {kind.expected}, one object {one}"
    ) from error
