"""InflightThrottler: limits the computations that are dispatched and not finished."""

from __future__ import annotations

import collections
from typing import Any

import jax


class InflightThrottler:
  """Lets a loop run ahead of the device by at most a fixed number of computations.

  Args:
    max_inflight: most computations that are dispatched and not finished; 0: no limit.

  Raises:
    ValueError: The number is negative.
  """

  def __init__(self, max_inflight: int):
    if max_inflight < 0:
      raise ValueError(
        f"max_inflight is {max_inflight}; expected at least 0 (0: no limit)"
      )
    self._max_inflight = max_inflight
    self._computations: collections.deque[Any] = collections.deque()

  def add_computation(self, computation: object) -> None:
    """Adds a dispatched computation.

    Args:
      computation: arrays that it returns and that are not donated later (a loss),
        because a donated array cannot be waited for.
    """
    # A device runs computations in order, so without a limit the newest one is enough.
    if not self._max_inflight:
      self._computations.clear()
    self._computations.append(computation)

  def wait_for_next(self) -> None:
    """Waits for the oldest computations until one more is allowed."""
    while self._max_inflight and len(self._computations) >= self._max_inflight:
      jax.block_until_ready(self._computations.popleft())

  def wait_for_all(self) -> None:
    """Waits until all computations are finished."""
    while self._computations:
      jax.block_until_ready(self._computations.popleft())
