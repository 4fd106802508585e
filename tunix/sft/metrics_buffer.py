"""Device scalars of a step, brought home a step late.

Reading a value of the step that runs now would make the loop wait for the device and
leave it idle while the next step is prepared. So a step's scalars start their
copy to the host at once and are read when the next step has been dispatched.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

Ready = list[tuple[int, dict[str, float]]]


class MetricsBuffer:
  """A queue of (step, scalars) that lags behind by a fixed number of steps.

  Which values come out depends on the steps put in and never on the device's speed,
  so that a run logs in the same order every time.

  Args:
    lag: steps that stay inside; 1 reads a step's values when the next was put.

  Raises:
    ValueError: a negative lag.
  """

  def __init__(self, lag: int = 1):
    if lag < 0:
      raise ValueError(f"lag is {lag}, it must be at least 0")
    self._lag = lag
    self._entries: collections.deque[tuple[int, dict[str, Any]]] = collections.deque()

  def __len__(self) -> int:
    return len(self._entries)

  def put(self, step: int, values: Mapping[str, Any]) -> None:
    """Takes the scalars of a step (JAX arrays of one element, or plain numbers)."""
    for value in values.values():
      if isinstance(value, jax.Array):
        value.copy_to_host_async()
    self._entries.append((step, dict(values)))

  def ready(self) -> Ready:
    """Takes out the steps that are `lag` old, oldest first, as Python floats."""
    return [self._pop() for _ in range(len(self._entries) - self._lag)]

  def drain(self) -> Ready:
    """Takes out everything; waits for the device."""
    return [self._pop() for _ in range(len(self._entries))]

  def _pop(self) -> tuple[int, dict[str, float]]:
    step, values = self._entries.popleft()
    return step, {name: float(np.asarray(value)) for name, value in values.items()}
