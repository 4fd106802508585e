"""JSON lines on disk as a sequence of records."""

from __future__ import annotations

import collections
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tunix.data.records import SFT, Kind, Record


class JsonlRecords(Sequence[dict[str, Any]]):
  """The records of a JSON-lines file, read when they are asked for.

  Memory holds 16 bytes a record (where its line begins, and its number), never the
  file. Blank lines are skipped. Safe to read from many threads, and to pickle.
  """

  def __init__(self, path: str | os.PathLike[str], kind: Kind = SFT):
    """Indexes the file in one pass.

    Args:
      path: of the file.
      kind: what its records are.

    Raises:
      FileNotFoundError: no such file.
      ValueError: the file has no record.
    """
    self.kind = kind
    self.path = pathlib.Path(path).expanduser()
    if not self.path.is_file():
      what = "a folder" if self.path.is_dir() else "no such file"
      raise FileNotFoundError(
        f"data file {str(self.path)!r}: {what}; give a file of JSON lines"
      )
    self._stamp = _stamp(self.path)
    self._offsets, self._lines, self.fingerprint = _index(self.path)
    if not len(self):
      raise ValueError(
        f"{self.path} is empty; {self.kind.expected}, one JSON object a line"
      )

  def __len__(self) -> int:
    return len(self._lines)

  def where(self, index: int) -> str:
    """The place of a record, as `file:line` with lines counted from 1."""
    return f"{self.path}:{self._lines[index]}"

  def __getitem__(self, index: Any) -> Any:
    """Record `index`, parsed and checked.

    Raises:
      FileNotFoundError: the file is gone.
      ValueError: the line is no valid record (the message names file and line), or the
        file is another one than was indexed.
    """
    if isinstance(index, slice):
      return [self[i] for i in range(*index.indices(len(self)))]
    index = range(len(self))[index]
    # Opening anew costs microseconds and needs no lock between threads.
    with self.path.open("rb") as file:
      if _stamp(file.fileno()) != self._stamp:
        raise ValueError(
          f"{self.path} was changed while it was read: leave it as it is while a run "
          "reads it, and begin again"
        )
      file.seek(int(self._offsets[index]))
      line = file.readline()
    record = _parsed(line, self.where(index), self.kind)
    self.kind.read(record, self.where(index))
    return record

  def validate(self) -> dict[str, int]:
    """Checks the structure of every record, without tokenising.

    Returns:
      How many records there are of each form.

    Raises:
      ValueError: for the first record that is wrong.
    """
    return dict(collections.Counter(read.form for _, read in self._checked()))

  def __iter__(self) -> Iterator[dict[str, Any]]:
    """All records, in one pass over the file."""
    return (record for record, _ in self._checked())

  def read(self) -> Iterator[Record]:
    """All records taken apart, in one pass over the file."""
    return (read for _, read in self._checked())

  def _checked(self) -> Iterator[tuple[dict[str, Any], Record]]:
    with self.path.open("rb") as file:
      for index, line in enumerate(line for line in file if line.strip()):
        where = self.where(index)
        record = _parsed(line, where, self.kind)
        yield record, self.kind.read(record, where)


def _stamp(file: pathlib.Path | int) -> tuple[int, int]:
  """What tells a file that was written anew: its size and its time."""
  status = os.stat(file)
  return status.st_size, status.st_mtime_ns


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


def place(records: Sequence[Mapping[str, Any]], index: int) -> str:
  """Where a record comes from, for error messages."""
  where = getattr(records, "where", None)
  return where(index) if where is not None else f"record {index}"


def _parsed(line: bytes, where: str, kind: Kind) -> Any:
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
