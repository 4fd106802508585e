"""The curves of a run, read line by line: memory does not grow with the run.

A curve keeps a fixed number of buckets at the most. Where a run has more values, a
bucket stands for several of them by its lowest and its highest: no peak is lost.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from tunix.sft.metrics_jsonl import METRICS_FILE, TIMINGS_FILE
from tunix.sft.metrics_records import decode

# A longer line is no record of metrics: a damaged file may hold no line end at all.
_LONGEST_LINE = 1 << 20
# Names that are followed; a loss that logs a name a step would fill memory with them.
_MOST_NAMES = 400


class Point(NamedTuple):
  """A value and its step."""

  step: int
  value: float


class Bucket(NamedTuple):
  """The lowest and the highest of values that follow each other."""

  low: Point
  high: Point

  def points(self) -> tuple[Point, ...]:
    """One or two, in the order of their steps."""
    return (
      (self.low,) if self.low == self.high else tuple(sorted((self.low, self.high)))
    )


class Curve:
  """One metric of one mode.

  Args:
    most: buckets that are kept; twice as many points at the most.
  """

  def __init__(self, most: int):
    self._most, self._width, self._filled = most, 1, 0
    self._buckets: list[Bucket] = []
    self.count = self.not_finite = 0
    self.first: Point | None = None
    self.last: Point | None = None

  def add(self, step: int, value: float) -> None:
    """Takes the next value; what is not finite is counted alone."""
    if not math.isfinite(value):
      self.not_finite += 1
      return
    point = Point(step, value)
    self.count, self.first, self.last = self.count + 1, self.first or point, point
    if self._buckets and self._filled < self._width:
      low, high = self._buckets[-1]
      if value < low.value:  # most values are neither, and make no object
        self._buckets[-1] = Bucket(point, high)
      elif value > high.value:
        self._buckets[-1] = Bucket(low, point)
      self._filled += 1
      return
    if len(self._buckets) == self._most:
      pairs = zip(self._buckets[::2], self._buckets[1::2])
      self._buckets = [_joined(*pair) for pair in pairs]
      self._width *= 2
    self._buckets.append(Bucket(point, point))
    self._filled = 1

  def points(self) -> list[Point]:
    """What is drawn, by step; the first and the last value are among them."""
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
    notes: what could not be read, in words.
  """

  by_name: dict[str, dict[str, Curve]] = dataclasses.field(default_factory=dict)
  notes: list[str] = dataclasses.field(default_factory=list)

  @property
  def last_step(self) -> int:
    """The highest step with a value; 0 without any."""
    curves = (c for modes in self.by_name.values() for c in modes.values())
    return max((curve.last.step for curve in curves if curve.last), default=0)


def read(folder: pathlib.Path, *, most: int = 200) -> Curves:
  """The curves of a run's folder, or of a trainer's log_dir.

  Args:
    folder: with `logs/metrics.jsonl`, or with `metrics.jsonl`.
    most: buckets of a curve, an even number.
  """
  place = folder / "logs" if (folder / "logs").is_dir() else folder
  curves = Curves()
  for name in (METRICS_FILE, TIMINGS_FILE):
    if (place / name).is_file():
      with (place / name).open("rb") as file:
        _read_file(file, name, curves, most)
    elif name == METRICS_FILE:
      curves.notes.append(f"there is no {name}: the run has logged nothing yet")
  if not curves.by_name and not curves.notes:
    curves.notes.append(f"{METRICS_FILE} is empty: the run has logged nothing yet")
  return curves


def _read_file(file: BinaryIO, name: str, curves: Curves, most: int) -> None:
  damaged: list[int] = []
  count = 0
  for number, line in _lines(file):
    record = _record(line)
    if record is None:
      count += 1
      damaged = damaged or [number]
      continue
    step, mode = record.pop("step"), str(record.pop("mode", "train"))
    for metric, value in record.items():
      if metric not in curves.by_name and len(curves.by_name) == _MOST_NAMES:
        continue
      modes = curves.by_name.setdefault(metric, {})
      if mode not in modes:
        modes[mode] = Curve(most)
      modes[mode].add(step, value)
  if count:
    curves.notes.append(
      f"{count:,} lines of {name} are damaged and left out, the first is line "
      f"{damaged[0]:,}"
    )


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
  """(number, line); a last line without an end is being written, and left out."""
  number = 1
  while line := file.readline(_LONGEST_LINE):
    if line.endswith(b"\n"):
      yield number, line
      number += 1
    elif len(line) == _LONGEST_LINE:
      yield number, b""  # the rest of it comes next, and is no record either


def _record(line: bytes) -> dict[str, Any] | None:
  """A line's step, mode and numbers; None: it is none of ours."""
  try:
    record = json.loads(line)
    if not isinstance(record, dict) or type(record["step"]) is not int:
      return None
    kept = {"step": record.pop("step"), "mode": record.pop("mode", None) or "train"}
    return kept | {name: float(decode(value)) for name, value in record.items()}
  except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
    return None


def _joined(a: Bucket, b: Bucket) -> Bucket:
  return Bucket(
    min(a.low, b.low, key=lambda p: p.value), max(a.high, b.high, key=lambda p: p.value)
  )
