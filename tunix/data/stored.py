"""Records that lie somewhere as a sequence: checked when they are read."""

from __future__ import annotations

import abc
import collections
import contextlib
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from tunix.data.records import SFT, Kind, Record


class Records(Sequence[dict[str, Any]], abc.ABC):
  """Records of one kind, by position; each is checked when it is read.

  Attributes:
    kind: what they are read as.
    name: of the whole, for messages.
    fingerprint: SHA-256 of their content.
    noun: what they lie in.
  """

  noun = "records"
  kind: Kind
  name: str
  fingerprint: Any

  @abc.abstractmethod
  def where(self, index: int) -> str:
    """The place of a record, for messages."""

  @abc.abstractmethod
  def raw(self, index: int) -> Any:
    """Record `index` (from 0), not checked yet.

    Raises:
      ValueError: it cannot be read; the message names its place.
    """

  def __getitem__(self, index: Any) -> Any:
    """Record `index`, checked.

    Raises:
      ValueError: it is no valid record; the message names its place.
    """
    if isinstance(index, slice):
      return [self[i] for i in range(*index.indices(len(self)))]
    index = range(len(self))[index]
    record = self.raw(index)
    self.kind.read(record, self.where(index))
    return record

  def __iter__(self) -> Iterator[dict[str, Any]]:
    """All records, in one pass."""
    return (record for record, _ in self.checked())

  def read(self) -> Iterator[Record]:
    """All records taken apart, in one pass."""
    return (read for _, read in self.checked())

  def validate(self) -> dict[str, int]:
    """Checks the structure of every record, without tokenising.

    Returns:
      How many records there are of each form.

    Raises:
      ValueError: for the first record that is wrong.
    """
    return dict(collections.Counter(read.form for _, read in self.checked()))

  def checked(self) -> Iterator[tuple[dict[str, Any], Record]]:
    """Every record with its parts, in one pass."""
    for index in range(len(self)):
      record = self.raw(index)
      yield record, self.kind.read(record, self.where(index))


class FileRecords(Records):
  """Records of a text file, read when they are asked for.

  Memory holds a few numbers a record (where it begins and ends), never the file. Safe
  to read from many threads, and to pickle.
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
      ValueError: the file has no record, or is not of its format.
    """
    self.kind = kind
    self.path = pathlib.Path(path).expanduser()
    self.name = str(self.path) if name is None else name
    if not self.path.is_file():
      what = "a folder" if self.path.is_dir() else "no such file"
      raise FileNotFoundError(
        f"data file {self.name!r}: {what}; give a file of {self.noun}"
      )
    self._stamp = _stamp(self.path)
    self.fingerprint = self._index()
    if not len(self):
      raise ValueError(f"{self.name} is empty; {kind.expected}")

  @abc.abstractmethod
  def _index(self) -> str:
    """Finds the records; returns the SHA-256 of the file."""

  @contextlib.contextmanager
  def opened(self) -> Iterator[BinaryIO]:
    """The file, to read a record of.

    Raises:
      FileNotFoundError: it is gone.
      ValueError: it is another one than was indexed.
    """
    # Opening anew costs microseconds and needs no lock between threads.
    with self.path.open("rb") as file:
      if _stamp(file.fileno()) != self._stamp:
        raise ValueError(
          f"{self.name} was changed while it was read: leave it as it is while a run "
          "reads it, and begin again"
        )
      yield file

  def piece(self, start: int, stop: int) -> bytes:
    """Bytes of the file; see `opened`."""
    with self.opened() as file:
      file.seek(start)
      return file.read(stop - start)


class Renamed(Records):
  """Records whose columns have other names.

  Args:
    records: those records.
    columns: our name -> theirs; other columns stay.
  """

  def __init__(self, records: Records, columns: Mapping[str, str]):
    self.records, self.columns = records, columns
    self.kind, self.name, self.noun = records.kind, records.name, records.noun

  @property
  def fingerprint(self) -> str:
    """Of the records as they lie."""
    return self.records.fingerprint

  def __len__(self) -> int:
    return len(self.records)

  def where(self, index: int) -> str:
    """See the base class."""
    return self.records.where(index)

  def raw(self, index: int) -> Any:
    """The record with our names.

    Raises:
      ValueError: it has no such column.
    """
    record = self.records.raw(index)
    if not isinstance(record, Mapping):
      return record  # which its kind refuses
    for ours, theirs in self.columns.items():
      if theirs not in record:
        raise ValueError(
          f"{self.where(index)}: there is no column {theirs!r} to take as {ours!r}: "
          f"there are {', '.join(map(repr, record)) or 'none'}"
        )
    rest = {k: v for k, v in record.items() if k not in self.columns.values()}
    return rest | {ours: record[theirs] for ours, theirs in self.columns.items()}


class HeldRecords(Records):
  """Anything that has a length and items as records: a list, a `datasets.Dataset`, a
  source of `tensorflow_datasets`, a `grain.MapDataset`.

  Values become plain: bytes are UTF-8 text, NumPy's numbers and arrays numbers and
  lists.
  """

  def __init__(self, items: Any, kind: Kind = SFT, *, name: str, noun: str = "records"):
    """Takes the items as they are.

    Raises:
      TypeError: they have no length or no items.
      ValueError: there are none.
    """
    if not hasattr(items, "__len__") or not hasattr(items, "__getitem__"):
      raise TypeError(
        f"{name} is a {type(items).__name__}: expected something with a length and "
        "items (a list, a datasets.Dataset, a grain.MapDataset)"
      )
    if isinstance(items, Mapping):
      raise TypeError(
        f"{name} is a mapping of {', '.join(map(repr, items))}: choose one of them "
        "(a data set of splits takes split='train')"
      )
    if not len(items):
      raise ValueError(f"{name} is empty; {kind.expected}")
    self.kind, self.name, self.noun, self._items = kind, name, noun, items

  def __len__(self) -> int:
    return len(self._items)

  def where(self, index: int) -> str:
    """The place of a record: the name, and its number from 0."""
    return f"{self.name}, record {index}"

  def raw(self, index: int) -> Any:
    """See the base class."""
    record = self._items[index]
    if not isinstance(record, Mapping):
      return record  # which its kind refuses
    where = self.where(index)
    return {key: _plain(value, where) for key, value in record.items()}

  @functools.cached_property
  def fingerprint(self) -> str:
    """SHA-256 of all records in their order."""
    digest = hashlib.sha256()
    for index in range(len(self)):
      text = json.dumps(self.raw(index), sort_keys=True, default=repr)
      digest.update(f"{text}\n".encode())
    return digest.hexdigest()


def _stamp(file: pathlib.Path | int) -> tuple[int, int]:
  """What tells a file that was written anew: its size and its time."""
  status = os.stat(file)
  return status.st_size, status.st_mtime_ns


def place(records: Sequence[Mapping[str, Any]], index: int) -> str:
  """Where a record comes from, for error messages."""
  where = getattr(records, "where", None)
  return where(index) if where is not None else f"record {index}"


def _plain(value: Any, where: str) -> Any:
  """A value as JSON would have it."""
  if isinstance(value, bytes):
    try:
      return value.decode()
    except UnicodeDecodeError as error:
      raise ValueError(f"{where}: bytes that are no UTF-8 text ({error})") from error
  if isinstance(value, np.ndarray | np.generic):
    return _plain(value.tolist(), where)
  if isinstance(value, Mapping):
    # Columnar formats fill in what a row's own object lacks: a message without "name"
    # comes back with "name": None.
    present = {key: part for key, part in value.items() if part is not None}
    return {key: _plain(part, where) for key, part in present.items()}
  if isinstance(value, list | tuple):
    return [_plain(part, where) for part in value]
  return value
