"""Metrics as JSON lines that a resumed run continues byte for byte.

Two files: `metrics.jsonl` holds values that every repetition of a run has again (loss,
norms, ...); `timings.jsonl` holds values that depend on the machine (`VOLATILE`). One
line for each step and mode:

    {"step": 12, "mode": "train", "loss": 2.25, "perplexity": 9.487735836358526}

Keys are in logging order; a metrics prefix stays part of the key ("actor/loss").
Reading a float gives the same bits that were written. Values that JSON cannot express
are the strings "NaN", "Infinity" and "-Infinity", which `float()` reads.
"""

from __future__ import annotations

import json
import logging
import os
import pathlib
from collections.abc import Collection
from typing import Any, BinaryIO

from tunix.sft.metrics.records import (
  Record,
  StepRecords,
  as_number,
  decode,
  split_event,
)

_log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
TIMINGS_FILE = "timings.jsonl"

# Parts of a metric's name that mark it as different in every run.
VOLATILE = frozenset(
  {
    "perf",
    "step_time_sec",
    "steps_per_sec",
    "tokens_per_sec",
    "samples_per_sec",
    "sequences_per_sec",
    "tflops_per_sec",
    "mfu",
    "device_memory_bytes",
    "host_memory_bytes",
    "checkpoint_time_sec",
    "data_time_sec",
    "data_wait_sec",
    "eval_time_sec",
    "generation_time_sec",
    "rollout_time_sec",
    "weight_sync_time_sec",
  }
)

# A line is written after two newer steps were seen. One newer step is not enough:
# metrics arrive a step late, so a hook may log step s before the trainer logs s - 1.
_OPEN_STEPS = 2


class JsonlBackend:
  """Writes `metrics.jsonl` and `timings.jsonl` into a local folder.

  After a kill nothing is lost that was logged before a checkpoint's `position()`, and
  nothing is written twice: `rewind` cuts off the lines after it. Open records are part
  of the position, so the bytes of a file do not depend on the times of checkpoints.

  Args:
    log_dir: the folder; it is made if missing.
    volatile: metrics with one of these parts in their name go to `timings.jsonl`.

  Raises:
    ValueError: `log_dir` is a URL.
    OSError: The folder cannot be made or written.
  """

  def __init__(
    self, log_dir: str | os.PathLike[str], *, volatile: Collection[str] = VOLATILE
  ):
    if "://" in str(log_dir):
      raise ValueError(
        f"log_dir is the URL {str(log_dir)!r}; JSON lines need a local folder. Name "
        "one, or choose other backends with backend_factories."
      )
    folder = pathlib.Path(log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    self._volatile = frozenset(volatile)
    self._metrics = _Stream(folder / METRICS_FILE)
    self._timings = _Stream(folder / TIMINGS_FILE)
    self._streams = (self._metrics, self._timings)

  def log_scalar(self, event: str, value: object, **kwargs: Any) -> None:
    """Takes one value; of the keywords only `step` is read."""
    mode, key = split_event(event)
    is_volatile = not self._volatile.isdisjoint(key.split("/"))
    stream = self._timings if is_volatile else self._metrics
    stream.add(int(kwargs.get("step") or 0), mode, key, as_number(event, value))

  def position(self) -> dict[str, Any]:
    """Returns the places in both files; everything before them is on disk."""
    return {stream.path.name: stream.position() for stream in self._streams}

  def rewind(self, position: dict[str, Any] | None) -> None:
    """Returns to a position; None renames the files of an earlier run."""
    if position is None:
      number = 1
      while any(stream.aside(number).exists() for stream in self._streams):
        number += 1
      for stream in self._streams:
        stream.move_aside(number)
      return
    for stream in self._streams:
      if (place := position.get(stream.path.name)) is not None:
        stream.rewind(place)

  def close(self) -> None:
    """Writes open records and closes the files; logging again opens them again."""
    for stream in self._streams:
      stream.close()

  flush = close


class _Stream:
  """One file of lines, with the open records that will be written to it."""

  def __init__(self, path: pathlib.Path):
    self.path = path
    self._records = StepRecords(_OPEN_STEPS)
    self._file: BinaryIO | None = None

  def add(self, step: int, mode: str | None, key: str, value: float) -> None:
    self._write(self._records.add(step, mode, key, value))

  def position(self) -> dict[str, Any]:
    if self._file is not None:
      os.fsync(self._file.fileno())
    return {"bytes": _size(self.path), "open": self._records.state()}

  def rewind(self, place: dict[str, Any]) -> None:
    self._release()
    self._records.load(place["open"])
    saved, size = int(place["bytes"]), _size(self.path)
    whole = _last_line_end(self.path, min(saved, size))
    if saved > size:
      _log.warning(
        "%s has %d bytes, the checkpoint was taken at byte %d: earlier metrics are "
        "missing from it, new ones are appended; restore the file to have them all",
        self.path,
        size,
        saved,
      )
    elif whole != saved:
      _log.warning(
        "%s: the checkpoint's position, byte %d, is inside a line, so the file was "
        "changed since; it is cut back to byte %d",
        self.path,
        saved,
        whole,
      )
    if whole != size:
      os.truncate(self.path, whole)

  def aside(self, number: int) -> pathlib.Path:
    return self.path.with_name(f"{self.path.name}.{number}")

  def move_aside(self, number: int) -> None:
    self._release()
    self._records = StepRecords(_OPEN_STEPS)
    if _size(self.path):
      os.replace(self.path, self.aside(number))
      _log.warning(
        "%s belongs to an earlier run without a checkpoint: it is renamed to %s",
        self.path,
        self.aside(number).name,
      )

  def close(self) -> None:
    self._write(self._records.release_all())
    self._release()

  def _write(self, records: list[Record]) -> None:
    if not records:
      return
    try:
      file = self._open()
      file.write(b"".join(map(_as_line, records)))
      file.flush()
    except OSError as error:
      raise OSError(
        error.errno, f"cannot write metrics ({error.strerror})", str(self.path)
      ) from error

  def _open(self) -> BinaryIO:
    if self._file is None:
      size = _size(self.path)
      whole = _last_line_end(self.path, size)
      if whole != size:  # a kill has cut the last line short
        os.truncate(self.path, whole)
      self._file = open(self.path, "ab")  # noqa: SIM115  (closed by _release)
    return self._file

  def _release(self) -> None:
    file, self._file = self._file, None
    if file is not None:
      os.fsync(file.fileno())
      file.close()


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Returns the lines of a metrics file as dicts, without an incomplete last line.

  Raises:
    OSError: The file does not exist.
    ValueError: A line is no JSON object; the message has its number.
  """
  lines = pathlib.Path(path).read_bytes().split(b"\n")[:-1]
  out = []
  for number, line in enumerate(lines, start=1):
    try:
      record = json.loads(line)
    except ValueError as error:
      raise ValueError(f"{path}:{number}: not a line of JSON: {error}") from error
    out.append({k: v if k == "mode" else decode(v) for k, v in record.items()})
  return out


def _as_line(record: Record) -> bytes:
  mode = {} if record.mode is None else {"mode": record.mode}
  fields = {"step": record.step, **mode, **record.encoded()}
  return (json.dumps(fields, allow_nan=False) + "\n").encode()


def _size(path: pathlib.Path) -> int:
  return path.stat().st_size if path.exists() else 0


def _last_line_end(path: pathlib.Path, limit: int) -> int:
  """Returns the largest n <= limit for which the first n bytes are whole lines."""
  if not limit:
    return 0
  # Backwards in blocks of 64 KiB: the file can be large, a line is short.
  block, end = 1 << 16, limit
  with open(path, "rb") as file:
    while end > 0:
      start = max(0, end - block)
      file.seek(start)
      newline = file.read(end - start).rfind(b"\n")
      if newline >= 0:
        return start + newline + 1
      end = start
  return 0
