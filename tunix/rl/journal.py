"""The journal of a greedy run: its decisions, and the episodes that have ended.

`decisions.bin` has a few bytes for each decision that depends on timing, `episodes.bin`
the content of the groups of completions that have ended. Both files only grow. A record
is a length, a checksum and JSON; it is written in one call before its effect is used,
so a killed process leaves at most one torn record at the end, which the next process
cuts off.

Records of decisions, in the order in which the thread of the engine took them:

    ["run", settings]                    first; settings that the next process must have
    ["start", version, stamp]            a new engine with these weights; what the one
                                         before it had not ended begins again
    ["switch", launch, version]          new weights, before this launch of the engine
    ["draw", launch, batch, group, [[episode, turn], ...], digest]
                                         actions that began, and what they were drawn
                                         for: prompts (answers of environments), limits
    ["end", launch, batch, group, digest, offset]
                                         a group of completions ended, with its rewards
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pathlib
import struct
import threading
import zlib
from collections.abc import Mapping
from typing import Any, BinaryIO

import jax

DECISIONS, EPISODES = "decisions.bin", "episodes.bin"
FOLDER = "journal"  # in the folder of the checkpoints
_PROCESS = "process_"  # begins the name of the folder of each of several processes

_MAGIC = b"tunix journal 1\n"
# Length and checksum of the payload, and a checksum of these two. Without the latter, a
# damaged length would look like a torn record.
_HEAD = struct.Struct("<III")

Group = tuple[int, int]  # number of the batch, number of the prompt in it


class JournalError(RuntimeError):
  """A record is damaged, or the journal belongs to another run."""


def read(path: pathlib.Path) -> tuple[list[tuple[int, Any]], int]:
  """Reads the records of a file.

  Returns: pairs of an offset and a record; and the end of the last whole record.

  Raises:
    JournalError: a record is damaged. A record that is cut off at the end is not.
  """
  with path.open("rb") as file:
    if not _begins(path, file):
      return [], 0
    out, at = [], len(_MAGIC)
    while (head := _head(path, file, at)) is not None:
      length, checksum = head
      payload = file.read(length)
      if len(payload) < length:
        break
      if zlib.crc32(payload) != checksum:
        raise _damaged(path, at)
      out.append((at, json.loads(payload)))
      at += _HEAD.size + length
    return out, at


def _end_of(path: pathlib.Path) -> int:
  """Returns the end of the last whole record of a file, of which it reads the heads.

  Raises:
    JournalError: a head is damaged.
  """
  with path.open("rb") as file:
    if not _begins(path, file):
      return 0
    size, at = path.stat().st_size, len(_MAGIC)
    while (head := _head(path, file, at)) is not None:
      if (end := at + _HEAD.size + head[0]) > size:
        break
      at = end
      file.seek(at)
    return at


def _begins(path: pathlib.Path, file: BinaryIO) -> bool:
  """Returns False if the process was killed while it made the file."""
  start = file.read(len(_MAGIC))
  if start != _MAGIC and not _MAGIC.startswith(start):
    raise JournalError(f"{path} is not a journal: expected it to begin with {_MAGIC!r}")
  return start == _MAGIC


def _head(path: pathlib.Path, file: BinaryIO, at: int) -> tuple[int, int] | None:
  """Returns the length and the checksum of the next record; None if it is cut off."""
  head = file.read(_HEAD.size)
  if len(head) < _HEAD.size:
    return None
  length, checksum, own = _HEAD.unpack(head)
  if own != zlib.crc32(head[:8]):
    raise _damaged(path, at)
  return length, checksum


def _damaged(path: pathlib.Path, at: int) -> JournalError:
  return JournalError(
    f"the record at byte {at} of {path} is damaged: its checksum is wrong. Restore the "
    "file from a copy, or train in another folder"
  )


class RecordFile:
  """A file of records that only grows. A torn record at its end is cut off.

  Args:
    path: the file; it is made if it is missing.
    end: end of its last whole record.
    reads: if True, the file is only read, and must be there.
  """

  def __init__(self, path: pathlib.Path, end: int, *, reads: bool = False):
    self._path, self._end, self._reads = path, end, reads
    if reads:
      self._file = os.open(path, os.O_RDONLY)
      return
    path.parent.mkdir(parents=True, exist_ok=True)
    self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    os.ftruncate(self._file, self._end)
    if not self._end:
      self._write(_MAGIC)

  def append(self, record: Any) -> int:
    """Writes a record, so that it survives a kill; returns its offset."""
    payload = json.dumps(record, separators=(",", ":")).encode()
    head = struct.pack("<II", len(payload), zlib.crc32(payload))
    at = self._end
    self._write(head + struct.pack("<I", zlib.crc32(head)) + payload)
    return at

  def _write(self, data: bytes) -> None:
    written = os.pwrite(self._file, data, self._end)
    if written != len(data):  # a full disk
      # A shorter record could be written here, and its successor would be the rest.
      os.ftruncate(self._file, self._end)
      raise OSError(
        f"{self._path} took {written} of {len(data)} bytes: free some space"
      )
    self._end += written

  def at(self, offset: int) -> Any:
    """Returns the record at an offset.

    Raises:
      JournalError: it is damaged.
    """
    head = os.pread(self._file, _HEAD.size, offset)
    found = _head(self._path, io.BytesIO(head), offset)
    if offset >= self._end or found is None:
      raise _damaged(self._path, offset)
    payload = os.pread(self._file, found[0], offset + _HEAD.size)
    if zlib.crc32(payload) != found[1]:
      raise _damaged(self._path, offset)
    return json.loads(payload)

  def sync(self) -> None:
    """Writes to the disk what the operating system holds, for a loss of power."""
    if not self._reads:
      os.fsync(self._file)

  def close(self) -> None:
    os.close(self._file)


class Journal:
  """The decisions and the ended groups of one run.

  One thread calls `add` and `end`, that of the engine. `store` may be called in any.

  Args:
    folder: folder of the two files; it is made if it is missing.
    reads: if True, the journal of another run is read, and must be there.

  Attributes:
    decisions: the decisions of earlier processes.
    ended: digest and offset of the groups that have ended.
    first_stamp: content stamp of the run's first weights; None: not known yet.
  """

  def __init__(self, folder: pathlib.Path, *, reads: bool = False):
    self.folder, self._reads = folder, reads
    decisions, episodes = folder / DECISIONS, folder / EPISODES
    records, end = read(decisions) if reads or decisions.exists() else ([], 0)
    self._file = RecordFile(decisions, end, reads=reads)
    # Only heads are read: the file may be larger than the memory.
    end = _end_of(episodes) if reads or episodes.exists() else 0
    self._episodes = RecordFile(episodes, end, reads=reads)
    self._storing = threading.Lock()
    self.decisions: list[Any] = [record for _, record in records]
    self.ended: dict[Group, tuple[str, int]] = {}
    starts = [x for x in self.decisions if x[0] == "start"]
    self.first_stamp: str | None = starts[0][2] if starts else None
    for record in self.decisions:
      if record[0] == "end":
        _, _, batch, group, digest, offset = record
        self.ended[batch, group] = digest, offset

  def check(self, settings: Mapping[str, Any]) -> None:
    """Writes the settings of a new journal, or compares them with those of an old one.

    Raises:
      JournalError: the journal belongs to a run with other settings.
    """
    if not self.decisions and self._reads:
      raise JournalError(f"{self.folder} has no decision: expected those of a run")
    if not self.decisions:
      self.add("run", dict(settings))
      return
    before = self.decisions[0][1]
    for name, value in settings.items():
      if before.get(name) != value:
        raise JournalError(
          f"{self.folder} belongs to a run with {name} {before.get(name)}, and this "
          f"run has {value}: use the settings of that run, or another folder"
        )

  def add(self, *record: Any) -> None:
    """Writes a decision."""
    self._file.append(record)

  def store(self, content: Any) -> int:
    """Writes the content of a group; returns its offset for `end`."""
    with self._storing:
      return self._episodes.append(content)

  def end(self, launch: int, group: Group, digest: str, offset: int) -> None:
    """Marks a stored group as ended: no later process samples it again."""
    self.add("end", launch, *group, digest, offset)
    self.ended[group] = digest, offset

  def content(self, group: Group) -> Any:
    """Returns the stored content of a group.

    Raises:
      JournalError: the content is damaged.
    """
    return self._episodes.at(self.ended[group][1])

  def sync(self) -> None:
    """Makes the records survive a loss of power."""
    self._episodes.sync()
    self._file.sync()

  def close(self) -> None:
    """Closes the files."""
    self.sync()
    self._episodes.close()
    self._file.close()


def folder_of(base: pathlib.Path) -> pathlib.Path:
  """Returns the folder of this process's journal in the folder of a run's journal.

  Each of several processes has one: its engine takes decisions of its own.

  Raises:
    JournalError: the journal belongs to one process, and this run has several, or the
      other way round. `Journal.check` compares how many.
  """
  several = jax.process_count() > 1
  found = base / DECISIONS if several else base / f"{_PROCESS}0"
  if found.exists():
    counts = ["1 process", "several"]
    raise JournalError(
      f"{base} belongs to a run with {counts[not several]}, and this run has "
      f"{counts[several]}: start as many processes as it began with, or use another "
      "folder"
    )
  return base / f"{_PROCESS}{jax.process_index()}" if several else base


def digest_of(value: Any) -> str:
  """Returns 16 hexadecimal digits that depend on each byte of a JSON value."""
  text = json.dumps(value, sort_keys=True, separators=(",", ":"))
  return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
