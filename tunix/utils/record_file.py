"""Files of records that only grow and survive a kill.

A file begins with `MAGIC`, which ends with the version of the format. A record is the
length of its bytes (uint32), their CRC-32, the CRC-32 of these two numbers, and the
bytes. Records are written in one call before their effect is used, so a killed process
leaves at most one torn record at the end. `RecordFile` cuts it off. Any other
difference is damage, which is refused with its place.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import struct
import zlib
from collections.abc import Iterable, Iterator

from tunix.utils import io

MAGIC = b"tunix journal 1\n"
# Length and checksum of the bytes, and a checksum of these two. Without the latter, a
# damaged length would look like a torn record.
_HEAD = struct.Struct("<III")


class RecordError(RuntimeError):
  """A record is damaged, or a file has no records."""


class RecordFile:
  """A file of records that only grows. A torn record at its end is cut off.

  Args:
    path: the file; it is made if it is missing.
    reads: if True, the file is only read, and must be there.

  Attributes:
    size: end of the last whole record, in bytes.

  Raises:
    RecordError: the file has no records, or the head of one is damaged.
  """

  def __init__(self, path: pathlib.Path, *, reads: bool = False):
    self._path, self._reads = path, reads
    self._file: int | None = None
    # Only heads are read: the file may be larger than the memory.
    self.size = _end_of(path) if reads or path.exists() else 0
    if reads:
      return
    path.parent.mkdir(parents=True, exist_ok=True)
    os.ftruncate(self._opened(), self.size)
    if not self.size:
      self._write(MAGIC)

  def append(self, record: bytes, *, sync: bool = False) -> int:
    """Writes a record, so that it survives a kill; returns its offset.

    Args:
      record: the bytes.
      sync: see the method `sync`, which is called if True.

    Raises:
      OSError: the disk is full. The file is as before.
    """
    at = self.size
    self._write(_framed(record))
    if sync:
      self.sync()
    return at

  def _write(self, data: bytes) -> None:
    file = self._opened()
    written = os.pwrite(file, data, self.size)
    if written != len(data):  # a full disk
      # A shorter record could be written here, and its successor would be the rest.
      os.ftruncate(file, self.size)
      raise OSError(
        f"{self._path} took {written} of {len(data)} bytes: free some space"
      )
    self.size += written

  def records(self) -> Iterator[bytes]:
    """Yields the records.

    Raises:
      RecordError: one is damaged.
    """
    return (record for _, record in self.placed())

  def placed(self) -> Iterator[tuple[int, bytes]]:
    """Yields (offset, record) of the records; see `records`."""
    at = len(MAGIC)
    while at < self.size:
      yield at, (record := self.at(at))
      at += _HEAD.size + len(record)

  def at(self, offset: int) -> bytes:
    """Returns the record at an offset.

    Raises:
      RecordError: it is damaged.
    """
    head = os.pread(self._opened(), _HEAD.size, offset)
    if offset >= self.size or len(head) < _HEAD.size:
      raise damaged(self._path, offset)
    length, checksum = _read_head(self._path, head, offset)
    record = os.pread(self._opened(), length, offset + _HEAD.size)
    if zlib.crc32(record) != checksum:
      raise damaged(self._path, offset)
    return record

  def rewrite(self, records: Iterable[bytes]) -> None:
    """Replaces all records; see `write`.

    Raises:
      OSError: the file has the old records or the new ones, and goes on with them.
    """
    try:
      write(self._path, records)
    finally:
      self.close()  # the file of the old records
      self.size = self._path.stat().st_size

  def sync(self) -> None:
    """Writes to the disk what the operating system holds, for a loss of power."""
    if not self._reads:
      os.fsync(self._opened())

  def close(self) -> None:
    """Closes the file; the next call of another method opens it again."""
    if self._file is not None:
      os.close(self._file)
      self._file = None

  def _opened(self) -> int:
    if self._file is None:
      flags = os.O_RDONLY if self._reads else os.O_RDWR | os.O_CREAT
      self._file = os.open(self._path, flags, 0o666)
    return self._file


def write(path: pathlib.Path, records: Iterable[bytes]) -> None:
  """Writes a whole file, and waits until the disk has it. A kill leaves the old one.

  Raises:
    OSError: the disk is full or not writable. An old file is unchanged.
  """
  io.write_atomic(path, itertools.chain([MAGIC], map(_framed, records)))
  io.sync_folder(path.parent)


@contextlib.contextmanager
def checked(path: pathlib.Path) -> Iterator[None]:
  """Turns errors of a block that reads the content of a file into RecordError."""
  try:
    yield
  except (KeyError, TypeError, ValueError, struct.error) as error:
    raise RecordError(
      f"{path} is cut off or damaged ({type(error).__name__}: {error}). Restore the "
      "file from a copy, or use another folder"
    ) from error


def damaged(path: pathlib.Path, at: int) -> RecordError:
  """Returns the error for the damaged record at an offset of a file."""
  return RecordError(
    f"the record at byte {at} of {path} is damaged: its checksum is wrong. Restore the "
    "file from a copy, or use another folder"
  )


def _framed(record: bytes) -> bytes:
  head = struct.pack("<II", len(record), zlib.crc32(record))
  return b"".join((head, struct.pack("<I", zlib.crc32(head)), record))


def _read_head(path: pathlib.Path, head: bytes, at: int) -> tuple[int, int]:
  """Returns the length and the checksum of the bytes of a record."""
  length, checksum, own = _HEAD.unpack(head)
  if own != zlib.crc32(head[:8]):
    raise damaged(path, at)
  return length, checksum


def _end_of(path: pathlib.Path) -> int:
  """Returns the end of the last whole record; 0 if a kill came before the first."""
  with path.open("rb") as file:
    start = file.read(len(MAGIC))
    if not MAGIC.startswith(start):
      raise RecordError(
        f"{path} begins with {start!r}; expected {MAGIC!r}. The file is damaged, or "
        "another version of tunix wrote it: restore it, or use another folder"
      )
    if start != MAGIC:
      return 0
    size, at = path.stat().st_size, len(MAGIC)
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
      end = at + _HEAD.size + _read_head(path, head, at)[0]
      if end > size:
        break
      at = end
      file.seek(at)
    return at
