"""Metrics as JSON lines that a resumed run continues byte for byte.

Two files: `metrics.jsonl` holds what the same run gives again (loss, norms, ...),
`timings.jsonl` what depends on the machine (`VOLATILE`). One line per (step, mode):

    {"step": 12, "mode": "train", "loss": 2.25, "perplexity": 9.487735836358526}

Keys stand in logging order, after the metrics prefix if there is one ("actor/loss").
Floats are written so that reading gives the same bits; values that JSON cannot
express are the strings "NaN", "Infinity", "-Infinity" (`float()` reads them).
"""

from __future__ import annotations

import json
import logging
import os
import pathlib
from collections.abc import Collection
from typing import Any, BinaryIO

from tunix.sft.metrics_records import (
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

# A line is written when two newer steps have been seen. One is not enough: metrics
# come home a step late, so a hook may log step s before the trainer logs s - 1.
OPEN_STEPS = 2


def encode_line(record: Record) -> bytes:
  """One (step, mode) as a line of JSON, newline included."""
  head: dict[str, Any] = {"step": record.step}
  if record.mode is not None:
    head["mode"] = record.mode
  return (json.dumps(head | record.encoded(), allow_nan=False) + "\n").encode()


class JsonlBackend:
  """Writes `metrics.jsonl` and `timings.jsonl` into a local folder.

  Nothing is lost by a kill that a checkpoint's `position()` has seen, and nothing is
  doubled: `rewind` cuts off what was written after it. Lines still waiting for
  values are part of the position, so that the bytes of a file do not depend on
  when checkpoints were taken.

  Args:
    log_dir: the folder, made if missing.
    volatile: metrics with one of these parts in their name go to `timings.jsonl`.

  Raises:
    ValueError: `log_dir` is a URL.
    OSError: the folder cannot be made or written.
  """

  def __init__(
    self, log_dir: str | os.PathLike[str], *, volatile: Collection[str] = VOLATILE
  ):
    if "://" in str(log_dir):
      raise ValueError(
        f"log_dir {str(log_dir)!r} is a URL, JSON lines need a local folder: give one, "
        "or choose other backends with backend_factories"
      )
    folder = pathlib.Path(log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    self._volatile = frozenset(volatile)
    self._metrics = _Stream(folder / METRICS_FILE)
    self._timings = _Stream(folder / TIMINGS_FILE)

  def log_scalar(self, event: str, value: Any, **kwargs: Any) -> None:
    """Notes one value; `step` is the keyword that counts."""
    mode, key = split_event(event)
    volatile = not self._volatile.isdisjoint(key.split("/"))
    stream = self._timings if volatile else self._metrics
    stream.add(int(kwargs.get("step") or 0), mode, key, as_number(event, value))

  def position(self) -> dict[str, Any]:
    """Where the files stand, after everything before it is on disk."""
    return {
      METRICS_FILE: self._metrics.position(),
      TIMINGS_FILE: self._timings.position(),
    }

  def rewind(self, position: dict[str, Any] | None) -> None:
    """Goes back to a position; None moves the files of an earlier run aside."""
    streams = (self._metrics, self._timings)
    if position is None:
      number = 1
      while any(stream.aside(number).exists() for stream in streams):
        number += 1
      for stream in streams:
        stream.move_aside(number)
      return
    for stream in streams:
      place = position.get(stream.path.name)
      if place is not None:
        stream.rewind(place)

  def flush(self) -> None:
    """Writes what waits."""
    self.close()

  def close(self) -> None:
    """Writes what waits and closes the files; logging again opens them again."""
    self._metrics.close()
    self._timings.close()


class _Stream:
  """One file of lines and the records that wait to be written to it."""

  def __init__(self, path: pathlib.Path):
    self.path = path
    self._records = StepRecords(OPEN_STEPS)
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
    wanted, size = int(place["bytes"]), _size(self.path)
    whole = _last_line_end(self.path, min(wanted, size))
    if wanted > size:
      _log.warning(
        "%s has %d bytes, the checkpoint was taken at byte %d: earlier metrics are "
        "missing from it, new ones are appended; restore the file to have them all",
        self.path,
        size,
        wanted,
      )
    elif whole != wanted:
      _log.warning(
        "%s: the checkpoint's position, byte %d, is inside a line, so the file was "
        "changed since; it is cut back to byte %d",
        self.path,
        wanted,
        whole,
      )
    if whole != size:
      os.truncate(self.path, whole)

  def aside(self, number: int) -> pathlib.Path:
    return self.path.with_name(f"{self.path.name}.{number}")

  def move_aside(self, number: int) -> None:
    self._release()
    self._records = StepRecords(OPEN_STEPS)
    if _size(self.path):
      os.replace(self.path, self.aside(number))
      _log.warning(
        "%s is of an earlier run without a checkpoint: moved to %s",
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
      file.write(b"".join(encode_line(record) for record in records))
      file.flush()
    except OSError as error:
      raise OSError(
        error.errno, f"cannot write metrics ({error.strerror})", str(self.path)
      ) from error

  def _open(self) -> BinaryIO:
    if self._file is None:
      size = _size(self.path)
      whole = _last_line_end(self.path, size)
      if whole != size:  # the rest of a line that a kill cut short
        os.truncate(self.path, whole)
      self._file = open(self.path, "ab")  # noqa: SIM115  (closed by _release)
    return self._file

  def _release(self) -> None:
    file, self._file = self._file, None
    if file is not None:
      os.fsync(file.fileno())
      file.close()


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """The lines of a metrics file as dicts; a last line that is cut short is left out.

  Raises:
    OSError: no such file.
    ValueError: a line that is no JSON object (with its number).
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


def _size(path: pathlib.Path) -> int:
  try:
    return path.stat().st_size
  except FileNotFoundError:
    return 0


def _last_line_end(path: pathlib.Path, limit: int) -> int:
  """The largest n <= limit such that the first n bytes are whole lines."""
  if not limit:
    return 0
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
