"""Records as a sequence, in memory or in a file, checked when they are read."""

from __future__ import annotations

import abc
import array
import collections
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tunix.data.records import SFT, Kind, Record
from tunix.utils import checks

# First bytes of files that are no UTF-8 text -> their format, and a conversion.
_FIRST_BYTES = {
  b"\x1f\x8b": ("compressed by gzip", "gunzip -k FILE"),
  b"BZh9": ("compressed by bzip2", "bunzip2 -k FILE"),
  b"\xfd7zXZ\0": ("compressed by xz", "unxz -k FILE"),
  b"\x28\xb5\x2f\xfd": ("compressed by Zstandard", "unzstd FILE"),
  b"PK\x03\x04": ("a zip archive", "unzip FILE"),
  b"\xff\xfe": ("text in UTF-16", "iconv -f UTF-16 -t UTF-8 FILE > NEW"),
  b"\xfe\xff": ("text in UTF-16", "iconv -f UTF-16 -t UTF-8 FILE > NEW"),
}


class Records(Sequence[dict[str, Any]], abc.ABC):
  """A sequence of records of one kind; each is checked when it is read.

  Attributes:
    kind: kind of the records.
    name: name of the sequence in messages, usually a path.
    fingerprint: SHA-256 of the content, in hex.
    noun: name of the storage format in messages.
    folder: folder of the file; None for records in memory.
  """

  noun = "records"
  folder: pathlib.Path | None = None
  kind: Kind
  name: str
  fingerprint: Any

  def __repr__(self) -> str:
    return f"{type(self).__name__}({self.name!r}, {len(self)} records)"

  def where(self, index: int) -> str:
    """Returns the place of record `index`, for messages."""
    return f"{self.name}, record {index}"

  def folder_of(self, index: int) -> pathlib.Path | None:
    """Returns the folder that relative paths of record `index` begin in, if any."""
    del index
    return self.folder

  @abc.abstractmethod
  def raw(self, index: int) -> Any:
    """Returns record `index` (from 0) without checking its fields.

    Raises:
      ValueError: the record cannot be read; the message names its place.
    """

  def __getitem__(self, index: Any) -> Any:
    """Returns record `index`, checked; a slice gives a list.

    Raises:
      ValueError: the record is invalid; the message names its place.
    """
    if isinstance(index, slice):
      return [self[i] for i in range(*index.indices(len(self)))]
    index = range(len(self))[index]
    record = self.raw(index)
    self.kind.read(record, self.where(index))
    return record

  def __iter__(self) -> Iterator[dict[str, Any]]:
    """Yields all records in one pass."""
    return (record for record, _ in self.checked())

  def read(self) -> Iterator[Record]:
    """Yields the parts of all records in one pass."""
    return (read for _, read in self.checked())

  def validate(self) -> dict[str, int]:
    """Checks the fields of every record, without tokenizing.

    Returns:
      The number of records of each form.

    Raises:
      ValueError: a record is invalid; the message names the first one.
    """
    return dict(collections.Counter(read.form for _, read in self.checked()))

  def checked(self) -> Iterator[tuple[dict[str, Any], Record]]:
    """Yields every record with its parts in one pass."""
    for index in range(len(self)):
      record = self.raw(index)
      yield record, self.kind.read(record, self.where(index))


class FileRecords(Records):
  """Records of a text file, read on access.

  Memory holds three integers per record (its first byte, its end and its line), not the
  text. Instances may be shared between threads and pickled.
  """

  def __init__(
    self, path: str | os.PathLike[str], kind: Kind = SFT, *, name: str | None = None
  ):
    """Indexes the file in one pass.

    Args:
      path: path of the file.
      kind: kind of its records.
      name: name of the file in messages; None takes the path.

    Raises:
      FileNotFoundError: the file is missing.
      ValueError: the file has no record, or another format.
    """
    self.kind = kind
    self.path = pathlib.Path(path).expanduser()
    self.folder = self.path.parent
    self.name = str(self.path) if name is None else name
    check_text_file(self.path, self.name, self.noun)
    self._stamp = _stamp(self.path)
    digest = hashlib.sha256()
    # A flat array takes 24 bytes per record; a list of tuples would take about 150.
    flat = array.array("q")
    for entry in self._entries(digest):
      flat.extend(entry)
    self._index = np.array(flat, np.int64).reshape(-1, 3)
    self.fingerprint = digest.hexdigest()
    if not len(self):
      raise ValueError(f"{self.name} is empty; {kind.expected}")

  @abc.abstractmethod
  def _entries(self, digest: Any) -> Iterator[tuple[int, int, int]]:
    """Yields (first byte, end, line from 1) of each record.

    Args:
      digest: a `hashlib` object that receives all bytes of the file.
    """

  def __len__(self) -> int:
    return len(self._index)

  def where(self, index: int) -> str:
    """Returns the place of record `index` as `file:line`, lines counted from 1."""
    return f"{self.name}:{self._index[index, 2]}"

  def text(self, index: int) -> bytes:
    """Returns the bytes of record `index`.

    Raises:
      FileNotFoundError: the file is gone.
      ValueError: the file changed since it was indexed.
    """
    start, stop, _ = map(int, self._index[index])
    # Opening again costs microseconds and needs no lock between threads.
    with self.path.open("rb") as file:
      if _stamp(file.fileno()) != self._stamp:
        raise ValueError(
          f"{self.name} was changed while it was read; leave the file unchanged during "
          "a run, and start the run again"
        )
      file.seek(start)
      return file.read(stop - start)


class Renamed(Records):
  """Records whose columns have other names.

  Args:
    records: records to read.
    columns: name that the kind expects -> name of the column in `records`. Other
      columns keep their names.
  """

  def __init__(self, records: Records, columns: Mapping[str, str]):
    self.records, self.columns = records, columns
    self.kind, self.name, self.noun = records.kind, records.name, records.noun

  @property
  def fingerprint(self) -> str:
    """Fingerprint of the records under their original names."""
    return self.records.fingerprint

  def __len__(self) -> int:
    return len(self.records)

  def where(self, index: int) -> str:
    """Returns the place of record `index`, for messages."""
    return self.records.where(index)

  def folder_of(self, index: int) -> pathlib.Path | None:
    """Returns the folder of record `index`, see `Records`."""
    return self.records.folder_of(index)

  def raw(self, index: int) -> Any:
    """Returns record `index` with renamed columns.

    Raises:
      ValueError: the record lacks a column.
    """
    return renamed(self.records.raw(index), self.columns, self.where(index))


class HeldRecords(Records):
  """Records of an object with a length and items.

  Such objects are a list, a `datasets.Dataset`, a `tensorflow_datasets` data source and
  a `grain.MapDataset`. Values are converted to JSON types: bytes to UTF-8 text, NumPy
  arrays to lists. Nulls in the objects of a list stay. In all other sources they are
  taken for filler and dropped, unless the features of the data set show that a null was
  written.
  """

  def __init__(
    self,
    items: Any,
    kind: Kind = SFT,
    *,
    name: str,
    noun: str = "records",
    folder: pathlib.Path | None = None,
  ):
    """Wraps the items without reading them.

    Args:
      items: object with a length and items by position.
      kind: kind of the records.
      name: name in messages.
      noun: name of the storage format in messages.
      folder: folder of the file; None for items in memory.

    Raises:
      TypeError: `items` has no length or no items by position.
      ValueError: `items` is empty.
    """
    if not hasattr(items, "__len__") or not hasattr(items, "__getitem__"):
      raise TypeError(
        f"{name} is {checks.type_of(items)}; expected an object with a length and "
        "items (a list, a datasets.Dataset, a grain.MapDataset). Give one, or read it "
        "as a stream"
      )
    if isinstance(items, Mapping):
      raise TypeError(
        f"{name} is a mapping of {', '.join(map(repr, items))}; choose one entry (a "
        "data set with splits takes split='train')"
      )
    if not len(items):
      raise ValueError(f"{name} is empty; {kind.expected}")
    self.kind, self.name, self.noun = kind, name, noun
    self.folder, self._items = folder, undecoded(items)

  def __len__(self) -> int:
    return len(self._items)

  def raw(self, index: int) -> Any:
    """Returns record `index` as plain values; raises as the base class does."""
    return as_json(self._items[index], self._items)

  @functools.cached_property
  def fingerprint(self) -> str:
    """SHA-256 of all records in order, in hex."""
    digest = hashlib.sha256()
    for index in range(len(self)):
      record = self.raw(index)
      if isinstance(record, Mapping):
        record = {key: _without_nulls(value, key) for key, value in record.items()}
      digest.update(f"{as_text(record)}\n".encode())
    return digest.hexdigest()


def check_file(path: pathlib.Path, name: str, noun: str) -> None:
  """Refuses a path that is no regular file.

  Args:
    path: path of the file.
    name: name of the file in messages.
    noun: name of the expected format in messages.

  Raises:
    FileNotFoundError: the path is missing, a folder, a pipe or a device.
  """
  if not path.is_file():
    problem = "a pipe or a device" if path.exists() else "no such file"
    problem = "a folder" if path.is_dir() else problem
    raise FileNotFoundError(f"data file {name!r}: {problem}; give a file of {noun}")


def check_text_file(path: pathlib.Path, name: str, noun: str) -> None:
  """Refuses a path that is no regular file, and files that begin as no UTF-8 text does.

  Args:
    path, name, noun: see `check_file`.

  Raises:
    FileNotFoundError: as for `check_file`.
    ValueError: the file is compressed, or text in UTF-16.
  """
  check_file(path, name, noun)
  with path.open("rb") as file:
    start = file.read(8)
  for first, (what, command) in _FIRST_BYTES.items():
    if start.startswith(first):
      raise ValueError(
        f"{name} is {what}; expected {noun} in UTF-8. Convert it, for example with "
        f"`{command}`"
      )


def no_utf8(where: str, error: UnicodeDecodeError) -> ValueError:
  """Returns the error for text that is no UTF-8.

  Args:
    where: place of the text.
    error: error of its decoding.
  """
  return ValueError(
    f"{where}: the byte 0x{error.object[error.start]:02x} is no UTF-8; expected text "
    "in UTF-8. Convert the file, for example from Latin-1 or Windows-1252 with "
    "`iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW`"
  )


def _stamp(file: pathlib.Path | int) -> tuple[int, int]:
  """Returns size and modification time, which change when a file is rewritten."""
  status = os.stat(file)
  return status.st_size, status.st_mtime_ns


def renamed(record: object, columns: Mapping[str, str], where: str) -> Any:
  """Returns a record with renamed columns.

  Args:
    record: the record; a value that is no mapping is returned, for `kind.read`.
    columns: see `Renamed`.
    where: place of the record.

  Raises:
    ValueError: the record lacks a column; begins with `where`.
  """
  if not columns or not isinstance(record, Mapping):
    return record
  for name, column in columns.items():
    if column not in record:
      raise ValueError(
        f"{where}: there is no column {column!r} for {name!r}; the record has "
        f"{', '.join(map(repr, record)) or 'none'}"
      )
  rest = {k: v for k, v in record.items() if k not in columns.values()}
  return rest | {name: record[column] for name, column in columns.items()}


def as_json(record: object, source: object) -> Any:
  """Returns a record as JSON types, without the filler of a columnar data set.

  Args:
    record: the record; a value that is no mapping is returned, for `kind.read`.
    source: object that the record is from. A list has no filler; `features` of a data
      set are the types of its columns.
  """
  if not isinstance(record, Mapping):
    return record
  plain = {key: _plain(value) for key, value in record.items()}
  if isinstance(source, list | tuple):
    return plain
  features = getattr(source, "features", None)
  types = features if isinstance(features, Mapping) else {}
  return {k: _without_filler(v, types.get(k)) for k, v in plain.items()}


def place(records: Any, index: object) -> str:
  """Returns the place of record `index` of any sequence, for messages."""
  where = getattr(records, "where", None)
  return where(index) if where is not None else f"record {index}"


def folder(records: Any, index: object) -> pathlib.Path | None:
  """Returns the folder of record `index` of any sequence; None if there is none."""
  get = getattr(records, "folder_of", None)
  return None if get is None else get(index)


def undecoded(items: Any) -> Any:
  """Returns a data set that gives images as they are stored, {"bytes", "path"}.

  `datasets` decodes the values of its type Image with each access, by its own rule.
  """
  features = getattr(items, "features", None)
  if isinstance(features, Mapping) and hasattr(items, "cast_column"):
    for name, feature in features.items():
      new = _undecoded_feature(feature)
      if repr(new) != repr(feature):
        items = items.cast_column(name, new)
  return items


def _undecoded_feature(feature: Any) -> Any:
  if isinstance(feature, list):
    return [_undecoded_feature(inner) for inner in feature]
  if isinstance(feature, Mapping):
    return {name: _undecoded_feature(inner) for name, inner in feature.items()}
  if (inner := getattr(feature, "feature", None)) is not None:
    return dataclasses.replace(feature, feature=_undecoded_feature(inner))
  is_image = type(feature).__name__ == "Image" and getattr(feature, "decode", False)
  return dataclasses.replace(feature, decode=False) if is_image else feature


def as_text(record: object) -> str:
  """Returns a record as JSON for digests; other values than JSON's by their content."""

  def shown(value: Any) -> str:
    is_image = hasattr(value, "tobytes")  # its `repr` shows an address
    return hashlib.sha256(value.tobytes()).hexdigest() if is_image else repr(value)

  return json.dumps(record, sort_keys=True, default=shown)


def _plain(value: object) -> Any:
  """Converts a value to JSON types: bytes to UTF-8 text, NumPy arrays to lists.

  Bytes that are no UTF-8 text, such as images, stay bytes.
  """
  if isinstance(value, bytes):
    try:
      return value.decode()
    except UnicodeDecodeError:
      return value
  if isinstance(value, np.ndarray | np.generic):
    return _plain(value.tolist())
  if isinstance(value, Mapping):
    return {key: _plain(part) for key, part in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(part) for part in value]
  return value


def _without_filler(value: object, feature: object) -> Any:
  """Drops the nulls that a columnar format added.

  Such formats give every object of a column the keys of all its objects: a message
  without "name" is read back with "name": None. A column that holds nothing but nulls
  has the type null; some of these nulls were written, so all stay.

  Args:
    value: a value of JSON types.
    feature: its type, a feature of `datasets`; None if it is unknown.
  """
  if isinstance(value, list):
    inner = feature[0] if isinstance(feature, list) else feature
    inner = getattr(inner, "feature", inner)
    return [_without_filler(part, inner) for part in value]
  if not isinstance(value, Mapping) or not isinstance(feature, Mapping | None):
    return value  # a feature that is no mapping decodes objects from JSON
  inner = feature or {}
  return {
    key: _without_filler(part, inner.get(key))
    for key, part in value.items()
    if part is not None or getattr(inner.get(key), "dtype", None) == "null"
  }


def _without_nulls(value: object, key: str) -> Any:
  """Drops the nulls that no rendering shows: all but those in arguments and schemas."""
  if isinstance(value, list):
    return [_without_nulls(part, key) for part in value]
  if not isinstance(value, Mapping) or key in ("arguments", "tools"):
    return value
  return {k: _without_nulls(v, k) for k, v in value.items() if v is not None}
