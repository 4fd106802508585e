"""Requests in the engine, as the event loop sees them.

The engine's thread wakes the loop after each delta. When the wait ends (by the last
delta, an error, a deadline or a disconnected client), every ticket that still runs is
cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import queue
import time
from collections.abc import AsyncIterator, Iterator, Sequence

from tunix.generate.engine.driver import Driver
from tunix.generate.engine.replicas import Replicas
from tunix.generate.engine.request import EngineDead, EngineRequest, Ticket
from tunix.generate.tokens import Completion, Delta, joined
from tunix.serve.http.errors import ApiError, bad, shutting_down

# Seconds between two checks of the driver, in case the engine ended without an error.
_LOOK = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
  """A delta of one of several requests.

  Attributes:
    request: number of the request in its list.
    delta: the delta.
  """

  request: int
  delta: Delta


class Run:
  """The requests of one call.

  Attributes:
    tickets: the tickets, in the order of the requests.
  """

  def __init__(
    self, driver: Driver | Replicas, requests: Sequence[EngineRequest], streams: bool
  ):
    """Submits the requests.

    Args:
      driver: the driver of the engine.
      requests: the requests.
      streams: deltas carry text while completions grow, not only at their end.

    Raises:
      ApiError: 400 if the engine refuses a request.
      EngineDead: the engine failed.
    """
    self._driver, self._open = driver, {}
    self.tickets: list[Ticket] = []
    try:
      for number, request in enumerate(requests):
        ticket = driver.engine.submit(request, streams=streams)
        self.tickets.append(ticket)
        self._open[number] = request.num_samples
    except ValueError as error:
      self.cancel()
      raise bad(None, str(error), "invalid_request") from error
    except BaseException:
      self.cancel()
      raise

  def cancel(self) -> None:
    """Cancels the tickets that still run; no ticket wakes the loop afterwards."""
    for number, ticket in enumerate(self.tickets):
      ticket.listen(None)
      if self._open.get(number):
        self._driver.engine.cancel(ticket)
    self._open.clear()

  async def parts(self, clock: Clock) -> AsyncIterator[Part]:
    """Yields deltas as they arrive, until every completion is over.

    Args:
      clock: time limit of the wait.

    Raises:
      RequestError: a request failed.
      EngineDead: the engine failed.
      ApiError: the wait took too long.
    """
    wake = asyncio.Event()
    loop = asyncio.get_running_loop()
    for ticket in self.tickets:
      ticket.listen(lambda: _wake(loop, wake))
    try:
      while self._open:
        wake.clear()
        # A dead engine puts nothing after its death, but it may have put deltas before.
        is_dead = self._driver.failure is not None or not self._driver.alive
        has_arrived = False
        for part in self._arrived():
          has_arrived = True
          yield part
        if not has_arrived and self._open:
          if is_dead:
            check_alive(self._driver)
          await _wait(wake, min(_LOOK, clock.left()))
          clock.check()
    finally:
      self.cancel()

  def _arrived(self) -> Iterator[Part]:
    """Yields the deltas that are there; raises the error that follows them."""
    for number in list(self._open):
      while number in self._open:
        try:
          delta = self.tickets[number].get(timeout=0)
        except queue.Empty:
          break
        if delta.finish_reason is not None:
          self._open[number] -= 1
          if not self._open[number]:
            del self._open[number]
        yield Part(request=number, delta=delta)


class Clock:
  """The time limit of a call.

  Attributes:
    drain_deadline: time at which a server that shuts down gives up, shared by all.
  """

  def __init__(self, seconds: float, drain: DrainDeadline, retry_after: int):
    self._seconds, self._end = seconds, time.monotonic() + seconds
    self._drain, self._retry_after = drain, retry_after

  def left(self) -> float:
    """Returns the seconds until `check` raises."""
    end = self._end if self._drain.at is None else min(self._end, self._drain.at)
    return max(0.0, end - time.monotonic())

  def check(self) -> None:
    """Raises ApiError if the time is over."""
    now = time.monotonic()
    if self._drain.at is not None and now >= self._drain.at:
      raise shutting_down(self._retry_after)
    if now >= self._end:
      raise ApiError(
        504,
        f"the request ran for {self._seconds:g} s, the server's limit for one. Ask "
        "for fewer tokens",
        code="timeout",
      )


class DrainDeadline:
  """The time at which a server that shuts down gives its requests up.

  `at` is None before the shutdown begins.
  """

  at: float | None = None


def check_alive(driver: Driver | Replicas) -> None:
  """Raises EngineDead if the engine does not run."""
  if driver.failure is not None:
    raise EngineDead(f"the engine failed: {driver.failure}") from driver.failure
  if not driver.alive:
    raise EngineDead("the engine does not run")


async def _wait(event: asyncio.Event, seconds: float) -> None:
  with contextlib.suppress(TimeoutError):
    async with asyncio.timeout(seconds):
      await event.wait()


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
  # An exception here would end the engine's thread.
  with contextlib.suppress(RuntimeError):  # the loop is closed
    loop.call_soon_threadsafe(event.set)


async def collect(run: Run, clock: Clock) -> list[list[Completion]]:
  """Waits for all completions, by request and sample."""
  rows: list[list[list[Delta]]] = [
    [[] for _ in range(ticket.request.num_samples)] for ticket in run.tickets
  ]
  async for part in run.parts(clock):
    rows[part.request][part.delta.sample].append(part.delta)
  return [[joined(deltas) for deltas in samples] for samples in rows]
