"""Device scalars of a training step, read one step late.

Reading a value of the running step would make the loop wait for the device, and leave
the device idle while the next step is prepared. Therefore the copy to the host starts
at once, and the values are read after the next step has been dispatched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

Ready = list[tuple[int, dict[str, float]]]


class MetricsBuffer:
  """Holds the scalars of one step until the next step is put.

  The order of the values depends on the steps alone, never on the speed of the device.
  A run therefore logs in the same order every time.
  """

  def __init__(self):
    self._waiting: list[tuple[int, dict[str, Any]]] = []

  def put(self, step: int, values: Mapping[str, Any]) -> Ready:
    """Takes the scalars of a step, and returns those of the step before it.

    Args:
      step: the number of the step.
      values: JAX arrays of one element, or Python numbers, by name.
    """
    for value in values.values():
      if isinstance(value, jax.Array):
        value.copy_to_host_async()
    ready = self.drain()
    self._waiting.append((step, dict(values)))
    return ready

  def drain(self) -> Ready:
    """Returns the scalars that wait, as Python floats; waits for the device."""
    waiting, self._waiting = self._waiting, []
    return [
      (step, {name: float(np.asarray(value)) for name, value in values.items()})
      for step, values in waiting
    ]
