"""Bounds the computations that are dispatched and not yet done."""

from __future__ import annotations

import collections
from typing import Any

import jax


class InflightThrottler:
  """Lets a loop run ahead of the device by a fixed number of computations.

  Args:
    max_inflight: computations that may be under way; 0 means no bound.

  Raises:
    ValueError: a negative number.
  """

  def __init__(self, max_inflight: int):
    if max_inflight < 0:
      raise ValueError(
        f"max_inflight is {max_inflight}, it must be at least 0 (0 means no bound)"
      )
    self._max_inflight = max_inflight
    self._computations: collections.deque[Any] = collections.deque()

  def add_computation(self, computation: Any) -> None:
    """Notes arrays that a dispatched computation returns.

    Give outputs that nothing donates later (a loss): a donated array cannot be waited
    for.
    """
    # Without a bound only the newest is kept: a device runs what it gets in order.
    if not self._max_inflight:
      self._computations.clear()
    self._computations.append(computation)

  def wait_for_next(self) -> None:
    """Waits for the oldest computations until there is room for one more."""
    while self._max_inflight and len(self._computations) >= self._max_inflight:
      jax.block_until_ready(self._computations.popleft())

  def wait_for_all(self) -> None:
    """Waits until nothing is under way."""
    while self._computations:
      jax.block_until_ready(self._computations.popleft())
