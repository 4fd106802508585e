"""Scalars that arrive one by one, gathered into one record per (step, mode)."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any

import numpy as np


class Mode(enum.StrEnum):
  """What a metric was measured on; interchangeable with its string."""

  TRAIN = "train"
  EVAL = "eval"


_MODES = tuple(mode.value for mode in Mode)


def split_event(event: str) -> tuple[str | None, str]:
  """'actor/train/loss' -> ('train', 'actor/loss'); (None, event) without a mode."""
  parts = event.split("/")
  # From the right: a prefix may be called "eval", the last part is the name.
  for i in range(len(parts) - 2, -1, -1):
    if parts[i] in _MODES:
      return parts[i], "/".join(parts[:i] + parts[i + 1 :])
  return None, event


def as_number(name: str, value: Any) -> float:
  """A Python, numpy or JAX scalar as a Python number (integers stay integers).

  Raises:
    ValueError: `value` has more than one element.
    TypeError: `value` is no number.
  """
  array = np.asarray(value)
  if array.size != 1:
    raise ValueError(
      f"metric {name!r} has shape {array.shape}, a scalar is needed: reduce it first"
    )
  if array.dtype.kind in "OUSM":
    raise TypeError(f"metric {name!r} is {value!r}, a number is needed")
  scalar = array.reshape(())
  return int(scalar) if array.dtype.kind in "bui" else float(scalar)


def encode(value: float) -> float | str:
  """A number that strict JSON can hold: NaN and infinities become strings."""
  if math.isfinite(value):
    return value
  return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def decode(value: float | str) -> float:
  """The inverse of `encode`."""
  return float(value) if isinstance(value, str) else value


@dataclasses.dataclass(kw_only=True)
class Record:
  """The values of one step and mode, in the order in which they came."""

  step: int
  mode: str | None
  values: dict[str, float] = dataclasses.field(default_factory=dict)

  def encoded(self) -> dict[str, float | str]:
    return {key: encode(value) for key, value in self.values.items()}


class StepRecords:
  """Records of the steps that may still get values.

  The `open_steps` steps opened last stay open; older ones are handed out, in the
  order in which they were opened, train before eval. So the order of the output does
  not depend on when exactly a value of a step comes home. A value for a step
  already handed out opens it a second time.
  """

  def __init__(self, open_steps: int):
    self._open_steps = open_steps
    self._steps: dict[int, dict[str | None, Record]] = {}

  def add(self, step: int, mode: str | None, key: str, value: float) -> list[Record]:
    """Takes a value; returns the records that this completes."""
    modes = self._steps.setdefault(step, {})
    record = modes.setdefault(mode, Record(step=step, mode=mode))
    record.values[key] = value
    if len(self._steps) <= self._open_steps:
      return []
    return self._release(next(iter(self._steps)))

  def release_all(self) -> list[Record]:
    """Every record that waits, oldest first; none is left."""
    return [record for step in list(self._steps) for record in self._release(step)]

  def state(self) -> list[Any]:
    """The waiting records, JSON-able."""
    return [
      [record.step, record.mode, record.encoded()]
      for modes in self._steps.values()
      for record in modes.values()
    ]

  def load(self, state: list[Any]) -> None:
    """Replaces what waits by what `state()` gave."""
    self._steps = {}
    for step, mode, values in state:
      decoded = {key: decode(value) for key, value in values.items()}
      record = Record(step=step, mode=mode, values=decoded)
      self._steps.setdefault(step, {})[mode] = record

  def _release(self, step: int) -> list[Record]:
    modes = self._steps.pop(step)
    order = (None, *_MODES)
    return sorted(modes.values(), key=lambda record: order.index(record.mode))
