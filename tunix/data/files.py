"""Files of records: JSON lines, a JSON array, CSV, ArrayRecord, parquet."""

from __future__ import annotations

import csv
import hashlib
import mmap
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from tunix.data import jsonl
from tunix.data.jsonl import JsonlRecords
from tunix.data.records import SFT, Kind
from tunix.data.stored import FileRecords, HeldRecords, Records
from tunix.utils import optional

ARRAY_RECORD = (".array_record", ".arrayrecord")
# A string of JSON as a whole, or what opens, closes and parts values.
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"|[][{},]', re.DOTALL)


def open_file(
  path: str | os.PathLike[str], kind: Kind = SFT, *, name: str | None = None
) -> Records:
  """The records of a file, whose format is known by the end of its name; a file of JSON
  is an array where it begins with one, else lines.

  Args:
    path: .jsonl, .json, .csv, .tsv, .parquet (with `datasets`), .array_record (or a
      pattern of several); any other name is a file of JSON lines.
    kind: what its records are.
    name: of the file in messages; None: its path.

  Raises:
    FileNotFoundError: no such file.
    ImportError: `datasets` is missing.
    ValueError: it has no record, or is not of its format.
  """
  text = os.fspath(path)
  known, suffix = name or text, pathlib.Path(name or text).suffix.lower()
  if known.endswith(ARRAY_RECORD):
    # Grain takes a second to import: only who has such files pays for it.
    from tunix.data.array_record import ArrayRecords

    return ArrayRecords(text, kind, name=name)
  if suffix in (".csv", ".tsv"):
    return CsvRecords(path, kind, name=name)
  if suffix == ".parquet":
    return HeldRecords(_parquet(text), kind, name=known, noun="parquet")
  is_array = suffix == ".json" and _begins_an_array(pathlib.Path(text).expanduser())
  return (JsonArrayRecords if is_array else JsonlRecords)(path, kind, name=name)


class JsonArrayRecords(FileRecords):
  """The objects of a file that is one JSON array."""

  noun = "a JSON array"

  def _index(self) -> str:
    with (
      self.path.open("rb") as file,
      mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
    ):
      borders = list(_borders(text, self.name))
      digest = hashlib.sha256(text).hexdigest()
      pieces = [(a, b) for a, b in borders if text[a:b].strip()]
    self._pieces = np.asarray(pieces, np.int64).reshape(-1, 2)
    return digest

  def __len__(self) -> int:
    return len(self._pieces)

  def where(self, index: int) -> str:
    """The place of a record: the file, and its number from 0."""
    return f"{self.name}, record {index}"

  def raw(self, index: int) -> Any:
    """See the base class."""
    start, stop = map(int, self._pieces[index])
    return jsonl.parsed(
      self.piece(start, stop), self.where(index), self.kind, "an entry"
    )


def _begins_an_array(path: pathlib.Path) -> bool:
  if not path.is_file():
    return False
  with path.open("rb") as file:
    return file.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _borders(text: mmap.mmap, name: str) -> Iterator[tuple[int, int]]:
  """Where the entries of the outermost array begin and end.

  Raises:
    ValueError: the array has no end, or something stands behind it.
  """
  depth, start = 0, 0
  for token in _TOKENS.finditer(text):
    mark = token[0]
    if mark in (b"[", b"{"):
      depth += 1
      start = token.end() if depth == 1 else start
    elif mark in (b"]", b"}"):
      depth -= 1
    if depth == 0 and mark in (b"]", b"}"):
      yield start, token.start()
      if text[token.end() :].strip():
        raise ValueError(
          f"{name}: something stands behind the JSON array (byte {token.end()}): "
          "expected one array, or JSON lines"
        )
      return
    if depth == 1 and mark == b",":
      yield start, token.start()
      start = token.end()
  raise ValueError(f"{name}: the JSON array has no end: the file may be cut off")


class CsvRecords(FileRecords):
  """The rows of a CSV file (or TSV) whose first row names the columns; all values are
  text, those of further columns that rewards see too."""

  noun = "CSV"

  def _index(self) -> str:
    self._separator = "\t" if self.name.lower().endswith(".tsv") else ","
    # A cell may hold a whole text; the module's limit is for the process.
    csv.field_size_limit(2**31 - 1)
    starts, lines, digest = [0], [1], hashlib.sha256()

    def read(file: Any) -> Iterator[str]:
      for line in file:
        digest.update(line)
        starts[-1] += len(line)
        lines[-1] += 1
        yield self._text(line, lines[-1] - 1)

    with self.path.open("rb") as file:
      rows = csv.reader(read(file), delimiter=self._separator)
      self.columns = [name.strip() for name in next(rows, [])]
      pieces = []
      try:
        begin, line = starts[-1], lines[-1]
        for row in rows:
          if row:
            pieces.append((begin, starts[-1], line))
          begin, line = starts[-1], lines[-1]
      except csv.Error as error:
        raise ValueError(f"{self.name}:{lines[-1]}: no CSV ({error})") from error
    self._pieces = np.asarray(pieces, np.int64).reshape(-1, 3)
    return digest.hexdigest()

  def _text(self, line: bytes, number: int) -> str:
    try:
      return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
      raise ValueError(f"{self.name}:{number}: no UTF-8 text ({error})") from error

  def __len__(self) -> int:
    return len(self._pieces)

  def where(self, index: int) -> str:
    """The place of a record, as `file:line` with lines counted from 1."""
    return f"{self.name}:{self._pieces[index][2]}"

  def raw(self, index: int) -> Any:
    """See the base class."""
    start, stop, line = map(int, self._pieces[index])
    text = self._text(self.piece(start, stop), line)
    [row] = csv.reader(text.splitlines(keepends=True), delimiter=self._separator)
    if len(row) != len(self.columns):
      raise ValueError(
        f"{self.where(index)}: {len(row)} cells, and the first line names "
        f"{len(self.columns)} columns: {', '.join(self.columns)}"
      )
    return dict(zip(self.columns, row))


def _parquet(path: str) -> Any:
  file = pathlib.Path(path).expanduser()
  if not file.is_file():
    raise FileNotFoundError(f"data file {path!r}: no such file; give a parquet file")
  datasets = optional.require("datasets", f"reading {path}", "tunix[data]")
  return datasets.load_dataset("parquet", data_files=str(file), split="train")
