"""Append-only files whose records are on disk when `append` returns.

A record is its length (uint32), its CRC-32 (uint32) and its bytes. A process that is
killed inside `append` leaves a part of a record at the end; `Journal` cuts it off. Its
request was never answered, so the client sends it again.
"""

from __future__ import annotations

import os
import pathlib
import struct
import zlib
from collections.abc import Iterable, Iterator

_HEAD = struct.Struct("<II")


class Journal:
  """One append-only file.

  Args:
    file: the file; it is made if it does not exist.

  Attributes:
    records: the records that were in the file.
    size: bytes of the file.
  """

  def __init__(self, file: pathlib.Path):
    self.records: list[bytes] = []
    data = file.read_bytes() if file.exists() else b""
    self.size = 0
    for record, end in _records(data):
      self.records.append(record)
      self.size = end
    is_new = not file.exists()
    self._path, self._file = file, file.open("ab")
    if self.size < len(data):
      self._file.truncate(self.size)
    if is_new:
      sync_folder(file.parent)

  def append(self, record: bytes, *, sync: bool = True) -> None:
    """Adds a record.

    Args:
      record: the bytes.
      sync: wait until the disk has them. Without it they survive the end of the
        process, but maybe not a loss of power.
    """
    data = framed(record)
    if self._file.closed:
      self._file = self._path.open("ab")
    self._file.write(data)
    self._file.flush()
    if sync:
      os.fdatasync(self._file.fileno())
    self.size += len(data)

  def close(self) -> None:
    """Closes the file; `append` opens it again."""
    self._file.close()


def framed(record: bytes) -> bytes:
  """Returns the bytes that a journal holds for a record."""
  return _HEAD.pack(len(record), zlib.crc32(record)) + record


def write_new(file: pathlib.Path, records: Iterable[bytes]) -> None:
  """Writes a new journal with some records, and waits until the disk has it."""
  with file.open("wb") as out:
    for record in records:
      out.write(framed(record))
    out.flush()
    os.fsync(out.fileno())


def sync_folder(folder: pathlib.Path) -> None:
  """Waits until the disk has the names of the files in a folder."""
  handle = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)


def _records(data: bytes) -> Iterator[tuple[bytes, int]]:
  """Yields the whole records and the position after each of them."""
  start = 0
  while start + _HEAD.size <= len(data):
    length, checksum = _HEAD.unpack_from(data, start)
    end = start + _HEAD.size + length
    record = data[start + _HEAD.size : end]
    if len(record) < length or zlib.crc32(record) != checksum:
      return
    yield record, end
    start = end
