"""Files of records: JSON lines, a JSON array, CSV, ArrayRecord, parquet."""

from __future__ import annotations

import csv
import io
import logging
import mmap
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any

from tunix.data.reading import jsonl, stored
from tunix.data.reading.jsonl import JsonlRecords
from tunix.data.reading.stored import FileRecords, HeldRecords, Records
from tunix.data.records import SFT, Kind
from tunix.utils import optional, terminal

_log = logging.getLogger(__name__)

ARRAY_RECORD = (".array_record", ".arrayrecord")
# Separators of the cells of a table, with their names for messages.
_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs"}
# A whole JSON string, or a character that opens, closes or separates values.
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"|[][{},]', re.DOTALL)

# A password before the host, a signature or token in a query, or in a call's arguments.
_SECRET = re.compile(
  r"""://[^/?#\s]*:[^/?#\s]*@ | https?://[^/?#\s]*@
  | [?&](x-amz-|x-goog-)?
    (sig|signature|((access|security)[_-]?)?token|api_?key|password|secret)=
  | [(,]\s*((hf|auth|access|use_auth)_)?(token|password|api_?key|secret)\s*=\s*["']""",
  re.IGNORECASE | re.VERBOSE,
)


def check_address(key: str, name: str) -> None:
  """Refuses the name of a source that holds a secret.

  Logs, messages, reports and `config.yaml` show the names of sources.

  Args:
    key: configuration key, or what the name is of, for the message.
    name: address, path or call of a source.

  Raises:
    ValueError: the name holds a secret; the message does not show it.
  """
  if _SECRET.search(name):
    raise ValueError(
      f"{key} holds a password, token or signature; expected an address without one, "
      "because logs and files of a run show it. Keep the secret in the environment "
      "(HF_TOKEN, or the settings of fsspec), or download the file"
    )


def open_file(
  path: str | os.PathLike[str], kind: Kind = SFT, *, name: str | None = None
) -> Records:
  """Opens a file of records, in the format that the ending of its name gives.

  A .json file is read as an array if it begins with `[`, else as JSON lines.

  Args:
    path: .jsonl, .json, .csv, .tsv, .parquet (needs `datasets`) or .array_record (also
      a pattern of several). Any other name is read as JSON lines.
    kind: kind of its records.
    name: name of the file in messages; None takes the path.

  Raises:
    FileNotFoundError: the file is missing.
    ImportError: `datasets` is missing.
    ValueError: the file has no record, or another format.
  """
  text = os.fspath(path)
  label, suffix = name or text, pathlib.Path(name or text).suffix.lower()
  if label.endswith(ARRAY_RECORD):
    # Importing Grain takes a second; only ArrayRecord files need it.
    from tunix.data.reading.array_record import ArrayRecords

    return ArrayRecords(text, kind, name=name)
  if suffix in (".csv", ".tsv"):
    return CsvRecords(path, kind, name=name)
  if suffix == ".parquet":
    folder = pathlib.Path(text).expanduser().parent
    return HeldRecords(_parquet(text), kind, name=label, noun="parquet", folder=folder)
  is_array = suffix == ".json" and _starts_with_array(pathlib.Path(text).expanduser())
  return (JsonArrayRecords if is_array else JsonlRecords)(path, kind, name=name)


class JsonArrayRecords(FileRecords):
  """Objects of a file that holds one JSON array."""

  noun = "a JSON array"

  def _entries(self, digest: Any) -> Iterator[tuple[int, int, int]]:
    with (
      self.path.open("rb") as file,
      mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
    ):
      # All borders are found first, so that a truncated file is refused before it is
      # hashed.
      borders = list(_borders(text, self.name))
      digest.update(text)
      # `where` counts entries instead of lines.
      yield from ((a, b, 0) for a, b in borders if text[a:b].strip())

  def where(self, index: int) -> str:
    """Returns the place of record `index`: the file and its number from 0."""
    return f"{self.name}, record {index}"

  def raw(self, index: int) -> Any:
    """Returns entry `index` of the array; raises as the base class does."""
    return jsonl.parsed(self.text(index), self.where(index), self.kind, "an entry")


def _starts_with_array(path: pathlib.Path) -> bool:
  if not path.is_file():
    return False
  with path.open("rb") as file:
    return file.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _borders(text: mmap.mmap, name: str) -> Iterator[tuple[int, int]]:
  """Yields the first and last byte position of each entry of the outermost array.

  Raises:
    ValueError: the array has no end, or text follows it.
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
          f"{name}: text follows the JSON array (byte {token.end()}); expected one "
          "array, or JSON lines"
        )
      return
    if depth == 1 and mark == b",":
      yield start, token.start()
      start = token.end()
  raise ValueError(f"{name}: the JSON array has no end; the file may be cut off")


class _CsvLines:
  """Lines of a CSV file, with the place that a reader of rows has reached.

  Attributes:
    start: first byte of the row.
    stop: end of the bytes read so far.
    first: number of the first line of the row, from 1.
    last: number of lines read so far.
    is_at_end: the reader has asked for a line after the last one.
  """

  def __init__(
    self,
    file: IO[bytes],
    digest: Any,
    separator: str,
    decode: Callable[[bytes, int], str],
  ):
    self._file, self._digest, self._decode = file, digest, decode
    self._separator, self._fewest = separator, sys.maxsize
    self.start, self.stop, self.first, self.last = 0, 0, 1, 0
    self.is_at_end = False

  def __iter__(self) -> Iterator[str]:
    for content in self._file:
      self._digest.update(content)
      self.stop += len(content)
      self.last += 1
      line = self._decode(content, self.last)
      if line.strip():
        self._fewest = min(self._fewest, line.count(self._separator))
      yield line
    self.is_at_end = True

  def begin_row(self) -> None:
    """Notes that the next line begins a row."""
    self.start, self.first, self._fewest = self.stop, self.last + 1, sys.maxsize

  def look_like_rows(self, columns: int) -> bool:
    """Returns True if the row has several lines, each with enough cells for a row."""
    return self.last > self.first and 0 < columns - 1 <= self._fewest


class CsvRecords(FileRecords):
  """Rows of a CSV or TSV file whose first row names the columns.

  All values are text, including further columns that reward functions receive. If the
  first line has no comma (in TSV no tab), but another separator, cells are separated by
  it: spreadsheets in many languages write semicolons.
  """

  noun = "CSV"

  def _entries(self, digest: Any) -> Iterator[tuple[int, int, int]]:
    self._separator = self._first_separator()
    # A cell may hold a whole document, which can exceed the default limit of 128 KiB.
    # The csv module has one limit for the whole process.
    csv.field_size_limit(2**31 - 1)
    with self.path.open("rb") as file:
      lines = _CsvLines(file, digest, self._separator, self._decode)
      rows = csv.reader(lines, delimiter=self._separator)
      try:
        self.columns = [name.strip() for name in next(rows, [])]
        self._check_end(lines, self.columns)
        self._check_columns()
        lines.begin_row()
        header, swallowed = lines.last, []
        for row in rows:  # a row spans several lines if a cell has line breaks
          self._check_end(lines, row)
          if row:
            yield lines.start, lines.stop, lines.first
            if lines.look_like_rows(len(self.columns)):
              swallowed.append(range(lines.first, lines.last + 1))
          lines.begin_row()
      except csv.Error as error:
        raise ValueError(
          f"{self.name}:{max(lines.last, 1)} is no {self.noun} ({error}); expected "
          "rows that end with a line feed. Correct that line, or convert the line ends."
        ) from error
    count, total = sum(map(len, swallowed)), lines.last - header
    if count > total / 2:
      _log.warning(
        "%s: %d of %d lines may be separate rows, but quotation marks join them into "
        "fewer rows, first in lines %d to %d. If they are separate rows, remove these "
        "marks, or write their cells in quotes with each mark in it doubled",
        *(self.name, count, total, swallowed[0].start, swallowed[0].stop - 1),
      )

  def _first_separator(self) -> str:
    with self.path.open("rb") as file:
      line = self._decode(file.readline(), 1)
    own = "\t" if self.name.lower().endswith(".tsv") else ","
    found = next((x for x in (own, *_SEPARATORS) if x in line), own)
    if found != own:
      self.noun = f"CSV separated by {_SEPARATORS[found]}"
    return found

  def _check_end(self, lines: _CsvLines, row: list[str]) -> None:
    """Refuses a row that the end of the file ends within quotes."""
    if not lines.is_at_end or not row:
      return
    line = lines.first + sum(cell.count("\n") for cell in row[:-1])
    raise ValueError(
      f"{self.name}:{line}: a quotation mark opens a cell, and none closes it; "
      "expected one at the end of the cell. Remove the mark, or write the cell in "
      "quotes with each mark in it doubled"
    )

  def _check_columns(self) -> None:
    for name in filter(None, self.columns):
      if self.columns.count(name) > 1:
        raise ValueError(
          f"{self.name}:1: the column {name!r} is named twice; expected different "
          "names. Rename one of the columns."
        )

  def _decode(self, line: bytes, number: int) -> str:
    try:
      return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
      raise stored.no_utf8(f"{self.name}:{number}", error) from error

  def raw(self, index: int) -> Any:
    """Returns row `index` by column; raises as the base class does."""
    text = self._decode(self.text(index), int(self._index[index, 2]))
    lines = io.StringIO(text, newline="\n")  # a cell may hold other ends of lines
    [row] = csv.reader(lines, delimiter=self._separator)
    if len(row) != len(self.columns):
      cells = terminal.counted(len(row), "cell")
      columns = terminal.counted(len(self.columns), "column")
      raise ValueError(
        f"{self.where(index)}: {cells}, but the first line names {columns}: "
        f"{', '.join(self.columns)}"
      )
    return dict(zip(self.columns, row))


def _parquet(path: str) -> Any:
  file = pathlib.Path(path).expanduser()
  stored.check_file(file, path, "parquet")
  datasets = optional.require("datasets", f"reading {path}", "tunix[data]")
  try:
    return datasets.load_dataset("parquet", data_files=str(file), split="train")
  # The library raises errors of its own, which wrap those of Arrow.
  except Exception as error:
    cause = str(error.__cause__ or error).partition("\n")[0]
    raise ValueError(
      f"{path} is no readable parquet ({cause}); expected a whole file. Write it again."
    ) from error
