"""Writer of trace files for ui.perfetto.dev and chrome://tracing.

The format is Chrome's trace format, a JSON array of events. A process of the run
becomes a process of the trace, a timeline (the host or a role) becomes a thread, and a
span becomes a complete event ("X"). Times are whole microseconds since the epoch, so
that the files of several processes line up. Times are rounded down, which keeps a
nested span inside the span around it.
"""

from __future__ import annotations

import json
import logging
import os
import pathlib
from typing import Any

from tunix.perf.metrics import HOST
from tunix.perf.span import Span

_log = logging.getLogger(__name__)

# An event takes about 150 bytes. Viewers do not open larger files.
MOST_EVENTS = 1_000_000

_END = b"\n]\n"


class PerfettoTraceWriter:
  """Writer of one trace file, which is valid JSON after every `flush`.

  An existing file is kept: it belongs to another run, or to this run before it was
  resumed. The writer takes the next free name: perf_trace.json, perf_trace_2.json, ...

  Args:
    export_dir: folder of the file; created if missing.
    process: index of this process. The file name contains it if it is not 0.
    epoch: Unix time, in seconds, at which the clock of the spans was 0.

  Attributes:
    path: path of the file; None before the first write.
  """

  def __init__(
    self, export_dir: str | os.PathLike[str], process: int = 0, epoch: float = 0.0
  ):
    self._folder = pathlib.Path(export_dir)
    self._process, self._epoch = process, epoch
    self._threads: dict[str, int] = {}
    self._waiting: list[dict[str, Any]] = []
    self._written = 0
    self.path: pathlib.Path | None = None

  def add(self, timeline: str, span: Span) -> None:
    """Queues an ended span, which the next `flush` writes."""
    begin = self._microseconds(span.begin)
    event = {
      "ph": "X",
      "cat": "host" if timeline.startswith(HOST) else "device",
      "name": span.name,
      "ts": begin,
      "dur": self._microseconds(span.begin + span.duration) - begin,
      **self._place(timeline),
    }
    if span.devices:
      event["args"] = {"devices": list(span.devices)}
    self._waiting.append(event)

  def flush(self) -> None:
    """Writes the spans that were added since the last call.

    Raises:
      OSError: the file cannot be written.
    """
    events, self._waiting = self._waiting, []
    room = MOST_EVENTS - self._written
    if len(events) > room > 0:
      _log.warning(
        "the trace %s is full with %d events: later spans are not written",
        self.path,
        MOST_EVENTS,
      )
    if not (events := events[: max(0, room)]):
      return
    text = ",\n".join(json.dumps(event) for event in events).encode()
    if self.path is None:
      self.path = self._free_name()
      self.path.write_bytes(b"[\n" + text + _END)
    else:
      with self.path.open("r+b") as file:
        file.seek(-len(_END), os.SEEK_END)
        file.write(b",\n" + text + _END)
    self._written += len(events)

  def _place(self, timeline: str) -> dict[str, int]:
    """Returns process and thread of a timeline, and names both at their first event."""
    if not self._threads:
      self._name("process_name", f"process {self._process}", 0)
    if timeline not in self._threads:
      self._threads[timeline] = len(self._threads)
      self._name("thread_name", timeline, self._threads[timeline])
    return {"pid": self._process, "tid": self._threads[timeline]}

  def _name(self, kind: str, name: str, thread: int) -> None:
    args = {"name": name}
    self._waiting.append(
      {"ph": "M", "name": kind, "pid": self._process, "tid": thread, "args": args}
    )

  def _microseconds(self, seconds: float) -> int:
    return int((self._epoch + seconds) * 1e6)

  def _free_name(self) -> pathlib.Path:
    self._folder.mkdir(parents=True, exist_ok=True)
    stem = f"perf_trace_process{self._process}" if self._process else "perf_trace"
    path, number = self._folder / f"{stem}.json", 1
    while path.exists():
      number += 1
      path = self._folder / f"{stem}_{number}.json"
    return path
