"""Metric values gathered into one record for each step and mode."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any

import numpy as np


class Mode(enum.StrEnum):
  """The data that a metric was measured on; equal to its string."""

  TRAIN = "train"
  EVAL = "eval"


_MODES = tuple(mode.value for mode in Mode)


def split_event(event: str) -> tuple[str | None, str]:
  """Splits "actor/train/loss" into ("train", "actor/loss").

  Returns: (mode, name with its prefix); the mode is None if the event has none.
  """
  parts = event.split("/")
  # From the right, because a prefix may be called "eval"; the last part is the name.
  for i in range(len(parts) - 2, -1, -1):
    if parts[i] in _MODES:
      return parts[i], "/".join(parts[:i] + parts[i + 1 :])
  return None, event


def as_number(name: str, value: object) -> float:
  """Converts a Python, NumPy or JAX scalar into a Python number.

  Args:
    name: the metric's name, for messages.
    value: the scalar; an integer stays an integer.

  Raises:
    ValueError: `value` has more than one element.
    TypeError: `value` is no number.
  """
  array = np.asarray(value)
  if array.size != 1:
    raise ValueError(
      f"metric {name!r} has shape {array.shape}; expected a scalar. Reduce it first."
    )
  if array.dtype.kind in "OUSM":
    raise TypeError(f"metric {name!r} is {value!r}; expected a number")
  scalar = array.reshape(())
  return int(scalar) if array.dtype.kind in "bui" else float(scalar)


def encode(value: float) -> float | str:
  """Returns a value that strict JSON can hold: NaN and infinities become strings."""
  if math.isfinite(value):
    return value
  return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def decode(value: float | str) -> float:
  """Reverses `encode`."""
  return float(value) if isinstance(value, str) else value


@dataclasses.dataclass(kw_only=True)
class Record:
  """The values of one step and mode, in logging order."""

  step: int
  mode: str | None
  values: dict[str, float] = dataclasses.field(default_factory=dict)

  def encoded(self) -> dict[str, float | str]:
    """Returns the values as strict JSON can hold them."""
    return {key: encode(value) for key, value in self.values.items()}


class StepRecords:
  """The records of the newest steps, which can still receive values.

  Values of a step arrive at different times: metrics of the device one step late,
  evaluations in between. The newest `open_steps` steps therefore stay open. Older steps
  are released in the order in which they were opened, mode "train" before "eval", so
  that the order of the output does not depend on the time of arrival. A value for a
  released step opens that step a second time.

  Args:
    open_steps: number of steps that stay open.
  """

  def __init__(self, open_steps: int):
    self._open_steps = open_steps
    self._steps: dict[int, dict[str | None, Record]] = {}

  def add(self, step: int, mode: str | None, key: str, value: float) -> list[Record]:
    """Takes a value; returns the records that it releases."""
    modes = self._steps.setdefault(step, {})
    record = modes.setdefault(mode, Record(step=step, mode=mode))
    record.values[key] = value
    if len(self._steps) <= self._open_steps:
      return []
    return self._release(next(iter(self._steps)))

  def release_all(self) -> list[Record]:
    """Returns all open records, the oldest step first, and closes them."""
    return [record for step in list(self._steps) for record in self._release(step)]

  def state(self) -> list[Any]:
    """Returns the open records as JSON."""
    return [
      [record.step, record.mode, record.encoded()]
      for modes in self._steps.values()
      for record in modes.values()
    ]

  def load(self, state: list[Any]) -> None:
    """Replaces the open records by those of a `state()`."""
    self._steps = {}
    for step, mode, values in state:
      decoded = {key: decode(value) for key, value in values.items()}
      record = Record(step=step, mode=mode, values=decoded)
      self._steps.setdefault(step, {})[mode] = record

  def _release(self, step: int) -> list[Record]:
    modes = self._steps.pop(step)
    order = (None, *_MODES)
    return sorted(modes.values(), key=lambda record: order.index(record.mode))
