"""Limits on running and waiting requests."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator

from tunix.serve.http.errors import ApiError, shutting_down
from tunix.utils import terminal


class Gate:
  """Admits a fixed number of requests; a bounded number waits in order of arrival.

  All methods belong to the thread of the event loop.

  Attributes:
    running: number of admitted requests.
    is_draining: new requests are refused.
  """

  def __init__(
    self, max_concurrent: int, max_queue: int, queue_timeout: float, retry_after: int
  ):
    self._most, self._most_waiting = max_concurrent, max_queue
    self._timeout, self._retry_after = queue_timeout, retry_after
    self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()
    self.running = 0
    self.is_draining = False

  @property
  def waiting(self) -> int:
    """Number of requests in the queue."""
    return len(self._waiting)

  @contextlib.asynccontextmanager
  async def entered(self) -> AsyncIterator[None]:
    """Waits for a place, and releases it at the end.

    Raises:
      ApiError: 429 if the queue is full or the wait too long; 503 while draining.
    """
    await self._enter()
    try:
      yield
    finally:
      self._leave()

  def drain(self) -> None:
    """Refuses waiting and new requests."""
    self.is_draining = True
    while self._waiting:
      place = self._waiting.popleft()
      if not place.done():
        place.set_exception(shutting_down(self._retry_after))

  async def _enter(self) -> None:
    if self.is_draining:
      raise shutting_down(self._retry_after)
    if self.running < self._most:
      self.running += 1
      return
    if len(self._waiting) >= self._most_waiting:
      running = terminal.counted(self.running, "running request")
      raise self._full(f"the server has {running} and {self.waiting} waiting")
    place = asyncio.get_running_loop().create_future()
    self._waiting.append(place)
    try:
      async with asyncio.timeout(self._timeout):
        await place  # `_leave` passes its place on
    except BaseException as error:
      if place in self._waiting:
        self._waiting.remove(place)
      elif place.done() and not place.cancelled() and place.exception() is None:
        self._leave()  # the place came together with the end of the wait
      if isinstance(error, TimeoutError):
        raise self._full(f"no place came free in {self._timeout:g} s") from error
      raise

  def _leave(self) -> None:
    while self._waiting:
      place = self._waiting.popleft()
      if not place.done():
        place.set_result(None)
        return
    self.running -= 1

  def _full(self, reason: str) -> ApiError:
    return ApiError(
      429,
      f"the server is full: {reason}. Send the request again later",
      code="queue_full",
      headers={"Retry-After": str(self._retry_after)},
    )
