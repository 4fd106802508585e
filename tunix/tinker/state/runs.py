"""One trained model: its requests in order, their results, and its files.

Every request is in the run's journal before the client gets an answer. The adapter is
written whole after some optimizer steps. A restart takes the last whole state and
repeats the requests since then, which gives the same bits, because a request's
computation depends on the adapter and the request alone. A request that is sent twice
has the same sequence number and is computed once.

Files in the folder of a run:

  info.json      owner and shape of the run, written once
  current        number g of the generation
  state-<g>      adapter, optimizer, and an open gradient; missing in generation 0
  journal-<g>    requests after this state, and results
"""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tunix.tinker.errors import ConflictError, GoneError, NotFoundError
from tunix.tinker.learning.learner import AdapterSpec, AdapterState
from tunix.tinker.protocol.results import Result, Results, start_record
from tunix.tinker.settings import TinkerSettings
from tunix.tinker.state import journal, state_file
from tunix.utils import array_codec, io, record_file
from tunix.utils.record_file import RecordError, RecordFile

_LOG = logging.getLogger(__name__)
# Tokens that a request, and each of its rows, count as besides their own.
_REQUEST_TOKENS, _ROW_TOKENS = 256, 16
# Bytes that a journal grows until the state is written, however few steps there were.
_LARGE = 256 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Op:
  """A request to a run.

  Attributes:
    kind: what to do, such as "forward_backward".
    args: JSON values.
    arrays: arrays by name.
  """

  kind: str
  args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

  @property
  def tokens(self) -> int:
    """Tokens that a turn of the request counts as."""
    sizes = (self.arrays[x].size for x in ("tokens", "lengths") if x in self.arrays)
    tokens, rows = next(sizes, 0), next(sizes, 0)
    return _REQUEST_TOKENS + tokens + _ROW_TOKENS * rows

  def record(self, **key: object) -> bytes:
    """Returns the record for a journal, with a key for the reader."""
    meta = {"type": "op", **key, "kind": self.kind, "args": dict(self.args)}
    return array_codec.to_bytes(meta, self.arrays)


class Run:
  """The requests and results of one trained model.

  All methods need the lock of the service.

  Args:
    folder: the run's folder, with `info.json`.
    settings: `keep_results` and `max_result_bytes` are used.

  Attributes:
    id, owner, spec, info: what identifies the run.
    state: the adapter; None: it is on disk, or not made yet.
    done: number of the last request that was computed, -1 for none.
    results: results by number, in that order.
    is_unloaded: True after `unload_model`.
    steps: optimizer steps since the state was written.
  """

  def __init__(self, folder: pathlib.Path, settings: TinkerSettings):
    self.folder = folder
    file = folder / "info.json"
    with record_file.checked(file):
      self.info = json.loads(file.read_text("utf-8"))
      self.id, self.owner = self.info["id"], self.info["owner"]
      self.spec = AdapterSpec(**self.info["spec"])
    self.state: AdapterState | None = None
    self.is_unloaded, self.steps = False, 0
    self.results = Results[int](settings.max_result_bytes)
    self._keep = settings.keep_results
    self._retrieved: set[int] = set()
    self._waiting: dict[int, Op] = {}
    self._sums: dict[int, int] = {}
    self._starts: dict[int, int] = {}  # of waiting requests, here and before
    self._generation = _generation_of(folder)
    self._remove_others()
    self.done = -1
    state = self._state_file()
    if state.exists():
      meta, _ = state_file.read(state)
      self.done, self.is_unloaded = meta["done"], meta["is_unloaded"]
    self._journal = journal.opened(self._journal_file())
    self._read(self._journal.records())
    self._began = 0  # bytes of the journal when its generation began
    if self.is_unloaded:
      self.close()

  @classmethod
  def create(
    cls, folder: pathlib.Path, info: Mapping[str, Any], settings: TinkerSettings
  ) -> Run:
    """Makes the folder of a new run."""
    io.write_json(folder / "info.json", dict(info))
    io.sync_folder(folder.parent)
    return cls(folder, settings)

  def accept(self, number: int, op: Op) -> None:
    """Writes a request to the journal, if it was not accepted before.

    Raises:
      ConflictError: another request had this number.
    """
    record = op.record(number=number)
    checksum = zlib.crc32(record)
    earlier = self._sums.get(number)
    if earlier is not None and earlier != checksum:
      raise ConflictError(
        f"request {number} of {self.id} was sent before with other contents; expected "
        "the same contents. Use the next number"
      )
    if self.is_known(number):
      return
    self._journal.append(record, sync=True)
    self._waiting[number] = op
    if op.kind != "refused":  # the cause may be gone when the client tries again
      self._sums[number] = checksum

  def next(self) -> tuple[int, Op] | None:
    """Returns the next request in order, or None if it has not arrived."""
    number = self.done + 1
    op = self._waiting.get(number)
    return None if op is None else (number, op)

  def is_known(self, number: int) -> bool:
    """Returns True if a request of this number was accepted."""
    return number <= self.done or number in self._waiting

  @property
  def last(self) -> int:
    """The largest number of an accepted request; -1 for none."""
    return max((self.done, *self._waiting))

  @property
  def unload(self) -> int | None:
    """Number of the accepted request that unloads the run; None: there is none."""
    numbers = [n for n, op in self._waiting.items() if op.kind == "unload_model"]
    for number, result in self.results.items():
      if result.values.get("type") == "unload_model":
        numbers.append(number)
    return min(numbers, default=None)

  @property
  def pending(self) -> int:
    """Number of requests that wait or run, without those that are repeated."""
    return sum(number not in self.results for number in self._waiting)

  @property
  def pending_bytes(self) -> int:
    """Bytes of the arrays of requests that wait or run."""
    return sum(x.nbytes for op in self._waiting.values() for x in op.arrays.values())

  def begin(self, number: int) -> int:
    """Counts a start of a request; returns the starts before, in any process."""
    before = self._starts.get(number, 0)
    self._count(number, before + 1)
    return before

  def stop(self) -> None:
    """Takes back the start of a request that runs, because the service stops it."""
    if starts := self._starts.get(self.done + 1, 0):
      self._count(self.done + 1, starts - 1)

  def _count(self, number: int, starts: int) -> None:
    self._starts[number] = starts
    self._note(start_record(starts, number=number))

  def _note(self, record: bytes) -> bool:
    """Writes a record that may be lost; returns False if it cannot be written."""
    try:
      self._journal.append(record)
    except OSError as error:
      _LOG.warning("the journal of %s cannot be written: %s", self.id, error)
      return False
    return True

  def finish(self, number: int, result: Result) -> None:
    """Records the result of the request that `next` returned."""
    if number not in self.results:
      if not self._note(result.record(number=number)):
        # A short record may have room. The request has ended, so no start counts.
        self._note(start_record(0, number=number))
      self.results[number] = result
    self.done = number
    del self._waiting[number]
    self._starts.pop(number, None)

  def result(self, number: int) -> Result | None:
    """Returns a result, or None if it is not computed yet.

    Raises:
      NotFoundError: there is no such request.
      GoneError: the result was dropped.
    """
    if (result := self.results.get(number)) is not None:
      self._retrieved.add(number)
      return result
    if number in self._waiting:
      return None
    if number <= self.done:
      raise GoneError(
        f"the result of request {number} of {self.id} was dropped, after it was "
        "retrieved or because newer ones fill max_result_bytes; expected "
        "an early retrieval. Keep results that you need"
      )
    raise NotFoundError(
      f"{self.id} has no request {number}; expected a number that was sent. Send the "
      "request again"
    )

  def is_due(self, steps: int) -> bool:
    """Returns True if the state should be written, `steps` after the last time.

    With an open gradient, which makes the state larger, it waits for the next update,
    unless the journal has grown large.
    """
    if self.state is None:
      return False
    is_open = self.state.gradient is not None
    is_large = self._journal.size - self._began > _LARGE
    return is_large or (self.steps >= steps and not is_open)

  def write_state(self, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes the file of the next generation, which `switch` takes into use.

    It needs no lock: only the thread that computes changes `done`.

    Args:
      arrays: adapter, optimizer and open gradient; empty after `unload_model`.
    """
    meta = {"done": self.done, "is_unloaded": self.is_unloaded}
    file = self.folder / f"state-{self._generation + 1}"
    state_file.write(file, meta, arrays)

  def switch(self) -> None:
    """Begins the next generation, whose state was written after the last request."""
    recent = self.done - self._keep
    for number in [n for n in self._retrieved if n <= recent]:
      self.results.pop(number)
      self._retrieved.discard(number)
    number = self._generation + 1
    records = [x.record(number=n) for n, x in self.results.items()]
    records += [x.record(number=n) for n, x in sorted(self._waiting.items())]
    records += [start_record(x, number=n) for n, x in self._starts.items()]
    file = self.folder / f"journal-{number}"
    record_file.write(file, records)
    # Errors come before `current` names the new journal: requests go to the old one.
    log = RecordFile(file)
    log.close()
    io.write_atomic(self.folder / "current", str(number).encode())
    self._journal.close()
    self._generation, self._journal = number, log
    self._began = self._journal.size
    self._sums = {n: x for n, x in self._sums.items() if n > recent}
    io.sync_folder(self.folder)
    self._remove_others()
    self.steps = 0

  def forget(self) -> None:
    """Drops the results of an unloaded run, but for that of its unload."""
    unload = self.unload
    for number in [n for n in self.results if n != unload]:
      self.results.pop(number)
    self.write_state({})
    self.switch()
    self.close()

  def stored_state(self) -> dict[str, np.ndarray] | None:
    """Returns the arrays of the last `write_state`, or None."""
    file = self._state_file()
    return state_file.read(file)[1] if file.exists() else None

  def close(self) -> None:
    """Closes the journal's file until the next request."""
    self._journal.close()

  def _state_file(self) -> pathlib.Path:
    return self.folder / f"state-{self._generation}"

  def _journal_file(self) -> pathlib.Path:
    return self.folder / f"journal-{self._generation}"

  def _read(self, records: Iterable[bytes]) -> None:
    for record in records:
      meta, arrays = array_codec.from_bytes(record)
      number = meta["number"]
      if meta["type"] == "result":
        self.results[number] = Result.of(meta, arrays)
      elif meta["type"] == "start":
        self._starts[number] = meta["count"]
      elif number > self.done:
        op = Op(kind=meta["kind"], args=meta["args"], arrays=arrays)
        self._waiting[number] = op
        if op.kind != "refused":
          self._sums[number] = zlib.crc32(record)

  def _remove_others(self) -> None:
    """Removes files of other generations, which a killed process may have left."""
    mine = {self._state_file().name, self._journal_file().name}
    for file in self.folder.iterdir():
      if file.name.startswith(("state-", "journal-")) and file.name not in mine:
        file.unlink()


def _generation_of(folder: pathlib.Path) -> int:
  """Returns the number of the generation in use.

  Raises:
    RecordError: its files are not there. A wrong number would remove the right ones.
  """
  file = folder / "current"
  if not file.exists():
    return 0
  text = file.read_text(errors="replace").strip()  # `echo` adds the end of a line
  names = [f"state-{text}", f"journal-{text}"]
  if not text.isdecimal() or not all((folder / name).exists() for name in names):
    raise RecordError(
      f"{file} is {text!r}; expected the number of a state and a journal beside it. "
      "Write this number into the file"
    )
  return int(text)
