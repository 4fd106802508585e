"""The journal of a greedy run: its decisions, and the episodes that have ended.

`decisions.bin` has a few bytes for each decision that depends on timing, `episodes.bin`
the content of the groups of completions that have ended. Both are files of records
(tunix/utils/record_file.py), and a record is JSON.

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
import json
import pathlib
import threading
from typing import Any

import jax

from tunix.rl.rollout.client import Group
from tunix.utils.record_file import RecordError, RecordFile

DECISIONS, EPISODES = "decisions.bin", "episodes.bin"
FOLDER = "journal"  # in the folder of the checkpoints
_PROCESS = "process_"  # begins the name of the folder of each of several processes


class JournalError(RecordError):
  """The journal belongs to another run."""


class Journal:
  """The decisions and the ended groups of one run.

  One thread calls `add` and `end`, that of the engine. `store` may be called in any.

  Args:
    folder: folder of the two files; it is made if it is missing.
    reads: if True, the journal of another run is read, and must be there.

  Attributes:
    decisions: the decisions of earlier processes.
    ends: digest and offset of the groups that have ended.
    first_stamp: content stamp of the run's first weights; None: not known yet.
  """

  def __init__(self, folder: pathlib.Path, *, reads: bool = False):
    self.folder, self._reads = folder, reads
    self._file = RecordFile(folder / DECISIONS, reads=reads)
    self._episodes = RecordFile(folder / EPISODES, reads=reads)
    self._storing = threading.Lock()
    self.decisions: list[Any] = [json.loads(x) for x in self._file.records()]
    self.ends: dict[Group, tuple[str, int]] = {}
    starts = [x for x in self.decisions if x[0] == "start"]
    self.first_stamp: str | None = starts[0][2] if starts else None
    for record in self.decisions:
      if record[0] == "end":
        _, _, batch, group, digest, offset = record
        self.ends[batch, group] = digest, offset

  def check(self, settings: dict[str, Any]) -> None:
    """Writes the settings of a new journal, or compares them with those of an old one.

    Raises:
      JournalError: the journal belongs to a run with other settings.
    """
    if not self.decisions and self._reads:
      raise JournalError(f"{self.folder} has no decision: expected those of a run")
    if not self.decisions:
      self.add("run", settings)
      return
    before = self.decisions[0][1]
    for name in before | settings:
      theirs, value = before.get(name), settings.get(name)
      if theirs != value:
        raise JournalError(
          f"{self.folder} belongs to a run with {name} {theirs}, and this run has "
          f"{value}: use the settings of that run, or another folder"
        )

  def add(self, *record: object) -> None:
    """Writes a decision."""
    self._file.append(_packed(record))

  def store(self, content: object) -> int:
    """Writes the content of a group; returns its offset for `end`."""
    with self._storing:
      return self._episodes.append(_packed(content))

  def end(self, launch: int, group: Group, digest: str, offset: int) -> None:
    """Marks a stored group as ended: no later process samples it again."""
    self.add("end", launch, *group, digest, offset)
    self.ends[group] = digest, offset

  def content(self, group: Group) -> Any:
    """Returns the stored content of a group.

    Raises:
      RecordError: the content is damaged.
    """
    return json.loads(self._episodes.at(self.ends[group][1]))

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
  folder = base / DECISIONS if several else base / f"{_PROCESS}0"
  if folder.exists():
    counts = ["1 process", "several"]
    raise JournalError(
      f"{base} belongs to a run with {counts[not several]}, and this run has "
      f"{counts[several]}: start as many processes as it began with, or use another "
      "folder"
    )
  return base / f"{_PROCESS}{jax.process_index()}" if several else base


def _packed(value: object) -> bytes:
  return json.dumps(value, separators=(",", ":")).encode()


def digest_of(value: object) -> str:
  """Returns 16 hexadecimal digits that depend on each byte of a JSON value."""
  text = json.dumps(value, sort_keys=True, separators=(",", ":"))
  return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
