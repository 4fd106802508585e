"""The curves of a run, read line by line: memory does not grow with the run.

A curve keeps a fixed number of buckets. If a run has more values, a bucket holds the
lowest and the highest of several values, so the curve keeps every peak.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from tunix.sft.metrics.jsonl import METRICS_FILE, TIMINGS_FILE
from tunix.sft.metrics.records import decode
from tunix.utils import terminal

# Bytes. A longer line is no record of metrics: a damaged file may lack line ends.
_LONGEST_LINE = 1 << 20
_LAST_STEP = 2**53  # a number of the page's script is exact up to it
# Metric names that are read; a loss that logs a new name each step would fill memory.
_MOST_NAMES = 400


class Point(NamedTuple):
  """One value of a metric and its step."""

  step: int
  value: float


class Bucket(NamedTuple):
  """The lowest and the highest of several consecutive values."""

  low: Point
  high: Point

  def points(self) -> tuple[Point, ...]:
    """Returns one or two points, in the order of their steps."""
    return tuple(sorted({self.low, self.high}))


class Curve:
  """One metric of one mode.

  Args:
    buckets: number of buckets; a curve has at most twice as many points, and two.
  """

  def __init__(self, buckets: int):
    self._max_buckets, self._width, self._filled = buckets, 1, 0
    self._buckets: list[Bucket] = []
    self.count = self.not_finite = 0
    self.first: Point | None = None
    self.last: Point | None = None

  def add(self, step: int, value: float) -> None:
    """Adds the next value. A value that is not finite only counts in `not_finite`."""
    if not math.isfinite(value):
      self.not_finite += 1
      return
    point = Point(step, value)
    self.count, self.first, self.last = self.count + 1, self.first or point, point
    if self._buckets and self._filled < self._width:
      low, high = self._buckets[-1]
      # Most values are neither lowest nor highest and allocate nothing.
      if value < low.value:
        self._buckets[-1] = Bucket(point, high)
      elif value > high.value:
        self._buckets[-1] = Bucket(low, point)
      self._filled += 1
      return
    if len(self._buckets) == self._max_buckets:
      pairs = zip(self._buckets[::2], self._buckets[1::2])
      self._buckets = [_joined(*pair) for pair in pairs]
      self._width *= 2
    self._buckets.append(Bucket(point, point))
    self._filled = 1

  def points(self) -> list[Point]:
    """Returns the points to draw by step, with the first and the last value."""
    ends = {p for p in (self.first, self.last) if p is not None}
    return sorted(ends.union(*(bucket.points() for bucket in self._buckets)))

  @property
  def low(self) -> Point:
    """The lowest value."""
    return min((bucket.low for bucket in self._buckets), key=lambda p: p.value)

  @property
  def high(self) -> Point:
    """The highest value."""
    return max((bucket.high for bucket in self._buckets), key=lambda p: p.value)


@dataclasses.dataclass(kw_only=True)
class Curves:
  """All curves of a run.

  Attributes:
    by_name: metric ("actor/loss") -> mode ("train", "eval") -> curve.
    notes: sentences about lines and files that cannot be read.
  """

  by_name: dict[str, dict[str, Curve]] = dataclasses.field(default_factory=dict)
  notes: list[str] = dataclasses.field(default_factory=list)

  @property
  def last_step(self) -> int:
    """The highest step with a value; 0 without any."""
    curves = (c for modes in self.by_name.values() for c in modes.values())
    return max((curve.last.step for curve in curves if curve.last), default=0)


def read(folder: pathlib.Path, *, buckets: int = 200) -> Curves:
  """Reads the curves of a run's folder, or of a trainer's log_dir.

  Args:
    folder: a folder with `logs/metrics.jsonl`, or with `metrics.jsonl`.
    buckets: number of buckets of a curve, an even number.
  """
  place = folder / "logs" if (folder / "logs").is_dir() else folder
  curves = Curves()
  for name in (METRICS_FILE, TIMINGS_FILE):
    if (place / name).is_file():
      with (place / name).open("rb") as file:
        _read_file(file, name, curves, buckets)
    elif name == METRICS_FILE:
      curves.notes.append(f"{name} is missing: the run has logged nothing yet")
  if not curves.by_name and not curves.notes:
    curves.notes.append(f"{METRICS_FILE} is empty: the run has logged nothing yet")
  return curves


def _read_file(file: BinaryIO, name: str, curves: Curves, buckets: int) -> None:
  count = first = 0
  for number, line in _lines(file):
    record = _record(line)
    if record is None:
      count, first = count + 1, first or number
      continue
    step, mode = record.pop("step"), str(record.pop("mode", "train"))
    for metric, value in record.items():
      if metric not in curves.by_name and len(curves.by_name) == _MOST_NAMES:
        continue
      modes = curves.by_name.setdefault(metric, {})
      if mode not in modes:
        modes[mode] = Curve(buckets)
      modes[mode].add(step, value)
  if count:
    curves.notes.append(
      f"{terminal.counted(count, 'damaged line')} of {name} skipped, the first is line "
      f"{first:,}"
    )


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
  """Yields line numbers and lines, without a last line that is still being written."""
  number = 1
  while line := file.readline(_LONGEST_LINE):
    if line.endswith(b"\n"):
      yield number, line
      number += 1
    elif len(line) == _LONGEST_LINE:
      yield number, b""  # the next read returns the rest of it, which is no record


def _record(line: bytes) -> dict[str, Any] | None:
  """Returns a line's step, mode and numbers; None for a damaged line."""
  try:
    record = json.loads(line)
    if not isinstance(record, dict) or type(record["step"]) is not int:
      return None
    if not 0 <= record["step"] <= _LAST_STEP:
      return None
    at = {"step": record.pop("step"), "mode": record.pop("mode", None) or "train"}
    return at | {name: float(decode(value)) for name, value in record.items()}
  except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
    return None


def _joined(a: Bucket, b: Bucket) -> Bucket:
  return Bucket(
    min(a.low, b.low, key=lambda p: p.value), max(a.high, b.high, key=lambda p: p.value)
  )
