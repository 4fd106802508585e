"""Journals of requests and results, also those of earlier versions of tunix.

A journal is a file of records (tunix/utils/record_file.py). In a journal of an earlier
version, a record is the length of its bytes (uint32), their CRC-32 and the bytes.
"""

from __future__ import annotations

import itertools
import pathlib
import struct
import zlib
from collections.abc import Iterator

from tunix.utils import array_codec, io, record_file
from tunix.utils.record_file import RecordFile

_HEAD = struct.Struct("<II")
_SEARCHED = 2**25  # bytes of a torn record


def opened(path: pathlib.Path) -> RecordFile:
  """Returns a journal. One of an earlier version is first written anew.

  Raises:
    RecordError: the journal is damaged.
  """
  is_new = not path.exists()
  if not is_new and _is_old(path):
    # A damaged journal is refused before it is replaced.
    record_file.write(path, list(_old_records(path)))
  file = RecordFile(path)
  if is_new:
    io.sync_folder(path.parent)
  return file


def _is_old(path: pathlib.Path) -> bool:
  with path.open("rb") as file:
    start = file.read(2 * len(record_file.MAGIC))
  # A torn record may end before the text by which the form is known.
  is_new = record_file.MAGIC.startswith(start[: len(record_file.MAGIC)])
  return not is_new and array_codec.is_start(start[_HEAD.size :])


def _old_records(path: pathlib.Path) -> Iterator[bytes]:
  """Yields the records of an earlier version, without a torn one at the end."""
  data, at = path.read_bytes(), 0
  while len(data) - at >= _HEAD.size:
    length, checksum = _HEAD.unpack_from(data, at)
    record = data[at + _HEAD.size : at + _HEAD.size + length]
    # A record is never empty, and the checksum of no bytes is 0.
    if length and len(record) == length and zlib.crc32(record) == checksum:
      yield record
      at += _HEAD.size + length
    elif len(record) == length or _begins_with(record, checksum):
      raise record_file.damaged(path, at)
    else:
      return


def _begins_with(data: bytes, checksum: int) -> bool:
  """Returns True if a beginning has this checksum: the record is not torn then.

  Only the first bytes are searched, which takes at most about 10 s.
  """

  def add(total, byte):
    return zlib.crc32(bytes([byte]), total)

  return checksum in itertools.accumulate(data[:_SEARCHED], add, initial=0)
