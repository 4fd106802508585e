"""JSON lines on disk as a sequence of records."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from tunix.data.records import SFT, Kind, Record
from tunix.data.stored import Records, place

__all__ = ["JsonlRecords", "parsed", "place"]


class JsonlRecords(Records):
  """The records of a JSON-lines file, read when they are asked for.

  Memory holds 16 bytes a record (where its line begins, and its number), never the
  file. Blank lines are skipped. Safe to read from many threads, and to pickle.
  """

  def __init__(
    self, path: str | os.PathLike[str], kind: Kind = SFT, *, name: str | None = None
  ):
    """Indexes the file in one pass.

    Args:
      path: of the file.
      kind: what its records are.
      name: of the file in messages; None: its path.

    Raises:
      FileNotFoundError: no such file.
      ValueError: the file has no record.
    """
    self.kind = kind
    self.path = pathlib.Path(path).expanduser()
    self.name = str(self.path) if name is None else name
    if not self.path.is_file():
      what = "a folder" if self.path.is_dir() else "no such file"
      raise FileNotFoundError(
        f"data file {self.name!r}: {what}; give a file of JSON lines"
      )
    self._offsets, self._lines, self.fingerprint = _index(self.path)
    if not len(self):
      raise ValueError(
        f"{self.name} is empty; {self.kind.expected}, one JSON object a line"
      )

  def __len__(self) -> int:
    return len(self._lines)

  def where(self, index: int) -> str:
    """The place of a record, as `file:line` with lines counted from 1."""
    return f"{self.name}:{self._lines[index]}"

  def raw(self, index: int) -> Any:
    """See the base class."""
    # Opening anew costs microseconds and needs no lock between threads.
    with self.path.open("rb") as file:
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


def parsed(line: bytes, where: str, kind: Kind) -> Any:
  """A record of JSON.

  Raises:
    ValueError: it is none; begins with `where`.
  """
  try:
    return json.loads(line)
  except (json.JSONDecodeError, UnicodeDecodeError) as error:
    raise ValueError(
      f"{where}: invalid JSON ({error}); {kind.expected}, one object a line"
    ) from error
  except RecursionError as error:
    raise ValueError(
      f"{where}: the JSON is nested too deeply; {kind.expected}, one object a line"
    ) from error


def _index(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray, str]:
  offsets, lines, digest, position = [], [], hashlib.sha256(), 0
  with path.open("rb") as file:
    for number, line in enumerate(file, start=1):
      if line.strip():
        offsets.append(position)
        lines.append(number)
      position += len(line)
      digest.update(line)
  return np.asarray(offsets, np.int64), np.asarray(lines, np.int64), digest.hexdigest()
