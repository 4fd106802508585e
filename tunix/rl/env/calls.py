"""Concurrent calls of the user's code, each with a deadline.

A call runs in a thread of its own, and a coroutine in one event loop that all of them
share, so that a client that was made in one call still works in the next. A thread
cannot be stopped. One that misses its deadline is left alone: its answer is not read,
and it does not count among the calls that may run at the same time.
"""

from __future__ import annotations

import asyncio
import collections
import contextvars
import dataclasses
import functools
import inspect
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from tunix.rl.env.env import EnvError
from tunix.rl.reward_outcomes import describe

Id = tuple[str, int]  # kind of the call, and number of its episode or group
_AFTER = ("group", "close", "cleanup")  # kinds of calls after an episode


@dataclasses.dataclass(eq=False)
class _Call:
  """A call.

  Attributes:
    id: given by the caller.
    function: the call.
    extra_s: seconds that it may take in addition.
    deadline: monotonic time at which it fails.
    future: of its coroutine, if it is one.
    waits: it waits for another episode, see `waiting`.
  """

  id: Id
  function: Callable[[], Any]
  extra_s: float = 0.0
  deadline: float = 0.0
  future: Any = None
  waits: bool = False


class Waiter:
  """A call that waits for another episode."""

  def __init__(self, call: _Call | None, timeout_s: float):
    self._call, self._timeout_s = call, timeout_s
    if call is not None:
      call.waits = True

  def goes_on(self) -> None:
    """Marks the call as working again, with all of its time."""
    if self._call is not None:
      self._call.deadline = time.monotonic() + self._timeout_s
      self._call.waits = False


_CURRENT: contextvars.ContextVar[tuple[_Call, float] | None] = contextvars.ContextVar(
  "call", default=None
)


def waiting() -> Waiter:
  """Marks the running call as one that waits for another episode of its batch.

  It must be called in a coroutine of an environment; elsewhere the mark has no effect.
  """
  return Waiter(*(_CURRENT.get() or (None, 0.0)))


class Calls:
  """Runs calls and hands out their results in the order in which they end.

  Args:
    workers: calls that run at the same time.
    timeout_s: most seconds of a call.
  """

  def __init__(self, workers: int, timeout_s: float):
    self._workers, self._timeout_s = workers, timeout_s
    self._queued: collections.deque[_Call] = collections.deque()
    self._running: set[_Call] = set()
    self._done: queue.SimpleQueue[tuple[_Call, Any]] = queue.SimpleQueue()

  @property
  def open(self) -> int:
    """Number of calls whose result `take` has not returned."""
    return len(self._queued) + len(self._running)

  @property
  def working(self) -> int:
    """Number of these on which an action may depend.

    Not counted are calls that wait for another episode, and those after an episode.
    """
    calls = [*self._queued, *self._running]
    return sum(not call.waits and call.id[0] not in _AFTER for call in calls)

  @property
  def all_wait(self) -> bool:
    """True if there are calls, and all of them wait for another episode."""
    return self.open > 0 and not self._queued and all(c.waits for c in self._running)

  def fail_waiting(self, error: str) -> None:
    """Fails all calls that wait for another episode."""
    for call in [call for call in self._running if call.waits]:
      self._running.remove(call)
      if call.future is not None:
        call.future.cancel()
      self._running.add(failed := _Call(call.id, call.function, deadline=math.inf))
      self._done.put((failed, EnvError(error)))

  def start(
    self, id: Id, function: Callable[..., Any], *args: Any, extra_s: float = 0.0
  ) -> None:
    """Starts a call as soon as there is room; `take` returns its result under `id`.

    Args:
      id: kind of the call, and a number.
      function: the function, plain or async.
      *args: its arguments.
      extra_s: seconds that it may take in addition to `timeout_s`.
    """
    self._queued.append(_Call(id, functools.partial(function, *args), extra_s))
    self._fill()

  def take(self, timeout: float) -> list[tuple[Id, Any]]:
    """Waits for results.

    Args:
      timeout: most seconds to wait for the first one; 0 does not wait.

    Returns:
      (id, result) of each call that has ended. The result of a call that raised or
      missed its deadline is an `EnvError`.
    """
    out: list[tuple[Id, Any]] = []
    now = time.monotonic()
    deadlines = [call.deadline for call in self._running if not call.waits]
    until = min([now + timeout, *deadlines])
    while True:
      try:
        wait = 0.0 if out else max(0.0, until - time.monotonic())
        call, result = self._done.get(block=wait > 0, timeout=wait or None)
      except queue.Empty:
        break
      if call in self._running:  # else it missed its deadline
        self._running.remove(call)
        out.append((call.id, result))
    out += self._late()
    self._fill()
    return out

  def _late(self) -> list[tuple[Id, Any]]:
    now = time.monotonic()
    late = [c for c in self._running if c.deadline <= now and not c.waits]
    for call in late:
      self._running.remove(call)
      if call.future is not None:
        call.future.cancel()
        # A plain function may block the loop; the next calls get another one.
        _LOOP.abandon()
    error = f"no answer within {self._timeout_s:g} s"
    return [(call.id, EnvError(error)) for call in late]

  def _fill(self) -> None:
    while self._queued and sum(not c.waits for c in self._running) < self._workers:
      call = self._queued.popleft()
      call.deadline = time.monotonic() + self._timeout_s + call.extra_s
      self._running.add(call)
      # A daemon, so that one that hangs does not keep the process from ending.
      threading.Thread(
        target=self._run, args=(call,), name="tunix environment", daemon=True
      ).start()

  def _run(self, call: _Call) -> None:
    try:
      result = call.function()
      if inspect.iscoroutine(result):
        tracked = self._tracked(call, result)
        call.future = asyncio.run_coroutine_threadsafe(tracked, _LOOP.get())
        result = call.future.result()
    # The function is the user's, and may raise anything, also SystemExit.
    except BaseException as error:
      result = error if isinstance(error, EnvError) else EnvError(describe(error))
    self._done.put((call, result))

  async def _tracked(self, call: _Call, coroutine: Any) -> Any:
    _CURRENT.set((call, self._timeout_s))
    try:
      return await coroutine
    except asyncio.CancelledError:
      raise
    except BaseException as error:  # SystemExit would end the loop of all calls
      return error if isinstance(error, EnvError) else EnvError(describe(error))


class _Loop:
  """The event loop that coroutines of all environments share, in a thread of its own.

  It lives as long as the process, so that a client or a semaphore that was made in one
  batch works in the next.
  """

  def __init__(self):
    self._lock = threading.Lock()
    self._loop: asyncio.AbstractEventLoop | None = None

  def get(self) -> asyncio.AbstractEventLoop:
    with self._lock:
      if self._loop is None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(
          target=self._loop.run_forever, name="tunix environments", daemon=True
        ).start()
      return self._loop

  def abandon(self) -> None:
    """Gives later calls another loop; those that run go on in this one."""
    with self._lock:
      self._loop = None


_LOOP = _Loop()


async def in_thread(function: Callable[[], Any]) -> Any:
  """Calls a plain function in a thread of its own, without blocking the loop.

  An awaitable that it returns is awaited in the loop.
  """
  loop = asyncio.get_running_loop()
  future: asyncio.Future[Any] = loop.create_future()

  def settle(result: Any, error: BaseException | None) -> None:
    if future.done():  # cancelled
      return
    if error is None:
      future.set_result(result)
    else:
      future.set_exception(error)

  def run() -> None:
    result, failure = None, None
    try:
      result = function()
    except BaseException as error:  # the function is the user's, as in `Calls`
      failure = error if isinstance(error, EnvError) else EnvError(describe(error))
    loop.call_soon_threadsafe(settle, result, failure)

  threading.Thread(target=run, name="tunix environment", daemon=True).start()
  result = await future
  return await result if inspect.isawaitable(result) else result
