"""Records of JSON-lines files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tunix.data.reading.stored import FileRecords, no_utf8, place
from tunix.data.records import Kind, Record

__all__ = ["JsonlRecords", "parsed", "place"]


class JsonlRecords(FileRecords):
  """Records of a JSON-lines file; blank lines are skipped."""

  noun = "JSON lines"

  def _entries(self, digest: Any) -> Iterator[tuple[int, int, int]]:
    start = 0
    with self.path.open("rb") as file:
      for number, line in enumerate(file, start=1):
        stop = start + len(line)
        if line.strip():
          yield start, stop, number
        digest.update(line)
        start = stop

  def raw(self, index: int) -> Any:
    """Returns the object of line `index`; raises as the base class does."""
    return parsed(self.text(index), self.where(index), self.kind)

  def checked(self) -> Iterator[tuple[dict[str, Any], Record]]:
    """Yields every record with its parts, and opens the file only once."""
    with self.path.open("rb") as file:
      for index, line in enumerate(line for line in file if line.strip()):
        where = self.where(index)
        record = parsed(line, where, self.kind)
        yield record, self.kind.read(record, where)


def parsed(text: bytes, where: str, kind: Kind, unit: str = "a line") -> Any:
  """Parses the JSON of one record.

  Args:
    text: JSON in UTF-8.
    where: place of the record.
    kind: kind of the record, whose forms the message names.
    unit: place of each object in the file, for the message.

  Raises:
    ValueError: `text` is no JSON, or no UTF-8; begins with `where`.
  """
  try:
    return json.loads(text)
  except UnicodeDecodeError as error:
    raise no_utf8(where, error) from error
  except ValueError as error:  # no JSON, or a number of 4,300 digits
    raise ValueError(
      f"{where}: invalid JSON ({error}); {kind.expected}, one object {unit}"
    ) from error
  except RecursionError as error:
    raise ValueError(
      f"{where}: the JSON is nested too deeply; {kind.expected}, one object {unit}"
    ) from error
