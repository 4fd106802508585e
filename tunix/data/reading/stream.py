"""Records of a stream: read in order, without a length and without random access.

A stream is made of parts. A part starts at any of its places, a JSON value, and yields
its records, each with the place after it.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tunix.data.reading import jsonl, stored
from tunix.data.reading.stored import HeldRecords
from tunix.data.records import SFT, Kind
from tunix.utils import checks

# Records that a resumed run compares; a file may grow behind them.
_COMPARED = 64
# Records whose order is drawn together. They are in memory at the same time.
SHUFFLED = 1024


class Item(NamedTuple):
  """A record of a stream; it stands where other records have a number.

  Attributes:
    where: place of the record, for messages.
    record: the record, not checked.
    folder: folder of the file; None for an iterable.
  """

  where: str
  record: Any
  folder: pathlib.Path | None = None


class Part(NamedTuple):
  """One source of a stream.

  Attributes:
    name: name in messages.
    start: (place) -> iterator of (item, place after the item), from this place on. None
      is the first place; all places are JSON.
  """

  name: str
  start: Callable[[Any], Iterator[tuple[Item, Any]]]


class Streamed:
  """Records of a stream, for `tunix.data.source.Source`.

  Attributes:
    parts: sources that are read one after the other in every pass.
    kind: kind of the records.
    columns: name that the kind expects -> name of the column in the sources.
    shuffle_buffer: records whose order is drawn together.
  """

  def __init__(
    self,
    parts: Sequence[Part],
    kind: Kind = SFT,
    *,
    columns: Mapping[str, str] | None = None,
    shuffle_buffer: int = SHUFFLED,
  ):
    checks.number("shuffle_buffer", shuffle_buffer, checks.COUNT, whole=True)
    self.parts, self.kind, self.columns = tuple(parts), kind, dict(columns or {})
    self.shuffle_buffer = shuffle_buffer

  @property
  def name(self) -> str:
    """Names of the parts, for messages."""
    return ", ".join(part.name for part in self.parts)

  def __repr__(self) -> str:
    return f"Streamed({self.name!r})"

  def where(self, item: Item) -> str:
    """Returns the place of a record, for messages."""
    return item.where

  def folder_of(self, item: Item) -> pathlib.Path | None:
    """Returns the folder of a record, see `Records`."""
    return item.folder

  def __getitem__(self, item: Any) -> Any:
    """Returns the record of an item, checked.

    Raises:
      ValueError: the record is invalid; the message names its place.
    """
    self.kind.read(item.record, item.where)
    return item.record

  def items(
    self, place: tuple[int, int, Any], num_epochs: int | None
  ) -> Iterator[tuple[Item, tuple[int, int, Any]]]:
    """Yields every item after a place, with the place after the item.

    Args:
      place: number of the pass, number of the part, place in the part; (0, 0, None) is
        the first place.
      num_epochs: number of passes; None never ends.

    Raises:
      ValueError: a record cannot be read, or a pass has no record.
    """
    first, begin, at = place
    passes = itertools.count(first) if num_epochs is None else range(first, num_epochs)
    for number in passes:
      is_empty = number > first  # the first pass may begin at its end
      for index in range(begin, len(self.parts)):
        for item, after in self.parts[index].start(at):
          is_empty = False
          record = stored.renamed(item.record, self.columns, item.where)
          yield item._replace(record=record), (number, index, after)
        at = None
      if is_empty:
        raise ValueError(
          f"{self.name} has no record in pass {number + 1}; expected the same records "
          "in every pass. Give a source that can be read again, or set num_epochs to 1"
        )
      begin = 0

  def validate(self) -> dict[str, int]:
    """Checks the fields of the first 64 records, see `Records.validate`."""
    return self.head(_COMPARED).validate()

  def head(self, count: int) -> HeldRecords:
    """Returns the first `count` records of a pass, in memory.

    Raises:
      ValueError: the stream is empty, or a record cannot be read.
    """
    items = itertools.islice(self.items((0, 0, None), 1), count)
    return _Head([item for item, _ in items], self.kind, self.name)

  @functools.cached_property
  def fingerprint(self) -> str:
    """SHA-256 of the first 64 records, in hex."""
    return self.head(_COMPARED).fingerprint


class _Head(HeldRecords):
  """The first records of a stream, with their places."""

  def __init__(self, items: Sequence[Item], kind: Kind, name: str):
    super().__init__([item.record for item in items], kind, name=name)
    self._given = items

  def where(self, index: int) -> str:
    """Returns the place of record `index`, for messages."""
    return self._given[index].where

  def folder_of(self, index: int) -> pathlib.Path | None:
    """Returns the folder of record `index`, see `Records`."""
    return self._given[index].folder


def of_file(
  path: str | os.PathLike[str], kind: Kind = SFT, *, name: str | None = None
) -> Part:
  """Returns a file of JSON lines as a part. Its place is a byte and a line.

  Args:
    path: path of the file.
    kind: kind of its records, for messages.
    name: name in messages; None takes the path.

  Raises:
    FileNotFoundError: the path is no regular file.
    ValueError: the file is compressed, or text in UTF-16.
  """
  file = pathlib.Path(path).expanduser()
  label = str(file) if name is None else name
  stored.check_text_file(file, label, "JSON lines")
  return Part(label, functools.partial(_lines, file, label, kind))


def of_iterable(source: object, *, name: str) -> Part:
  """Returns an iterable, or a function that makes one, as a part.

  The place is the state of the iterable (`state_dict`, as `datasets.IterableDataset`
  has it) or of its iterator (`get_state`, as Grain's have it). Without either it is the
  number of records: a resumed run reads these records again and drops them.

  Args:
    source: iterable that can be iterated again, or a function without arguments that
      returns a new iterable or iterator of the same records.
    name: name in messages.

  Raises:
    TypeError: `source` is neither, or an iterator, which can be read once only.
  """
  if isinstance(source, Iterator) or not (callable(source) or _is_iterable(source)):
    raise TypeError(
      f"{name} is {checks.type_of(source)}; expected an iterable that can be read "
      "again. Give the function that makes the iterator"
    )
  make = source if callable(source) else lambda: source
  return Part(name, functools.partial(_iterated, make, name))


def _is_iterable(source: object) -> bool:
  return hasattr(source, "__iter__") and not isinstance(source, str | bytes | Mapping)


def _lines(
  path: pathlib.Path, name: str, kind: Kind, place: Sequence[int] | None
) -> Iterator[tuple[Item, list[int]]]:
  start, number = place or (0, 0)
  with path.open("rb") as file:
    file.seek(start)
    for line in file:
      start, number = start + len(line), number + 1
      if line.strip():
        where = f"{name}:{number}"
        item = Item(where, jsonl.parsed(line, where, kind), path.parent)
        yield item, [start, number]


def _iterated(
  make: Callable[[], Any], name: str, place: Sequence[Any] | None
) -> Iterator[tuple[Item, list[Any]]]:
  number, state = place or (0, None)
  made = stored.undecoded(make())
  # A copy, because `load_state_dict` sets the start of later passes too, and iterators
  # of one `datasets.IterableDataset` share parts of their state.
  source = copy.deepcopy(made) if hasattr(made, "state_dict") else made
  if state is not None and source is not made:
    source.load_state_dict(state)
  if not _is_iterable(source):
    raise TypeError(
      f"{name} gives {checks.type_of(source)}; expected an iterable of records"
    )
  iterator = iter(source)
  read_state = getattr(source, "state_dict", getattr(iterator, "get_state", None))
  if read_state is None:
    iterator = itertools.islice(iterator, number, None)
  elif state is not None and source is made:
    iterator.set_state(state)
  for record in iterator:
    where = f"{name}, record {number}"
    number += 1
    item = Item(where, stored.as_json(record, source))
    yield item, [number, read_state and read_state()]
