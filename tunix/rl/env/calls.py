"""Concurrent calls of the user's code, each with a deadline.

A call runs in a thread that no other call has, and a coroutine in one event loop that
all of them share, so that a client that was made in one call still works in the next. A
thread cannot be stopped. One that misses its deadline is left alone: it does not count
among the calls that may run at the same time, and its answer goes to `discard` if it
still comes.

A coroutine that blocks keeps all others of the loop from running. It fails after
`MOST_BLOCK_S`, or at its deadline if that is earlier, and calls that start later get
another loop.
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
from collections.abc import Callable, Collection
from typing import Any

from tunix.rl.env import threads
from tunix.rl.env.env import EnvError
from tunix.sandbox.errors import describe

Id = tuple[str, int]  # kind of the call, and number of its episode or group
_AFTER = ("group", "close", "cleanup")  # kinds of calls after an episode
MOST_BLOCK_S = 10.0  # in which a coroutine must give the loop to others


@dataclasses.dataclass(eq=False)
class _Call:
  """A call.

  Attributes:
    id: given by the caller.
    function: the call.
    extra_s: seconds that it may take in addition.
    deadline: monotonic time at which it fails.
    discard: takes a result that came after the deadline.
    future: of its coroutine, if it is one.
    loop, task: the event loop of its coroutine, and the coroutine's task there.
    waits: it waits for another episode, see `waiting`.
    state: "open", "done" (it has a result), or "late" (it missed its deadline).
  """

  id: Id
  function: Callable[[], Any]
  extra_s: float = 0.0
  deadline: float = 0.0
  discard: Callable[[Any], None] | None = None
  future: Any = None
  loop: _Loop | None = None
  task: Any = None
  waits: bool = False
  state: str = "open"


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
    self._lock = threading.Lock()  # of the states of calls

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

  def give_up(self, except_for: Collection[str]) -> None:
    """Gives up all calls except those of some kinds; coroutines are cancelled.

    `take` still returns the results of calls that have ended.
    """
    kept = [call for call in self._queued if call.id[0] in except_for]
    self._queued = collections.deque(kept)
    running = [call for call in self._running if call.id[0] not in except_for]
    self._failed(running, lambda _: "it was given up")

  def start(
    self,
    id: Id,
    function: Callable[..., Any],
    *args: object,
    extra_s: float = 0.0,
    discard: Callable[[Any], None] | None = None,
  ) -> None:
    """Starts a call as soon as there is room; `take` returns its result under `id`.

    Args:
      id: kind of the call, and a number.
      function: the function, plain or async.
      *args: its arguments.
      extra_s: seconds that it may take in addition to `timeout_s`.
      discard: gets a result that comes after the deadline, in the thread of the call.
    """
    call = functools.partial(function, *args)
    self._queued.append(_Call(id, call, extra_s, discard=discard))
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
    out: list[tuple[Id, Any]] = []
    for loop in {call.loop for call in self._running if call.loop is not None}:
      if (task := loop.blocked_by(MOST_BLOCK_S)) is not None:
        blocking = [call for call in self._running if call.task is task]
        _LOOPS.abandon(loop)
        out += self._failed(blocking, lambda _: _BLOCKS.format(MOST_BLOCK_S))
    late = [c for c in self._running if c.deadline <= now and not c.waits]
    return out + self._failed(late, self._why_late)

  def _failed(
    self, calls: list[_Call], why: Callable[[_Call], str]
  ) -> list[tuple[Id, Any]]:
    """Gives up calls; those that have a result by now keep it."""
    out: list[tuple[Id, Any]] = []
    for call in calls:
      with self._lock:
        if call.state == "done":
          continue
        call.state = "late"
      self._running.remove(call)
      out.append((call.id, EnvError(why(call))))
      if call.future is not None:
        call.future.cancel()
    return out

  def _why_late(self, call: _Call) -> str:
    task = None if call.loop is None else call.loop.current()
    if task is None or call.loop is None:
      return f"no answer within {self._timeout_s:g} s"
    _LOOPS.abandon(call.loop)  # the next calls get another one
    if task is call.task:
      return _BLOCKS.format(self._timeout_s)
    return (
      f"no answer within {self._timeout_s:g} s; the async method of another "
      "environment blocks the event loop"
    )

  def _fill(self) -> None:
    while self._queued and sum(not c.waits for c in self._running) < self._workers:
      call = self._queued.popleft()
      call.deadline = time.monotonic() + self._timeout_s + call.extra_s
      self._running.add(call)
      threads.start(functools.partial(self._run, call))

  def _run(self, call: _Call) -> None:
    try:
      result = call.function()
      if inspect.iscoroutine(result):
        call.loop = loop = _LOOPS.get()
        call.future = loop.start(self._tracked(call, result))
        result = call.future.result()
    # The function is the user's, and may raise anything, also SystemExit.
    except BaseException as error:
      result = error if isinstance(error, EnvError) else EnvError(describe(error))
    with self._lock:
      is_late, call.state = call.state == "late", "done"
    if not is_late:
      self._done.put((call, result))
    elif call.discard is not None and not isinstance(result, EnvError):
      call.discard(result)

  async def _tracked(self, call: _Call, coroutine: Any) -> Any:
    call.task = asyncio.current_task()
    _CURRENT.set((call, self._timeout_s))
    try:
      return await coroutine
    except asyncio.CancelledError:
      raise
    except BaseException as error:  # SystemExit would end the loop of all calls
      return error if isinstance(error, EnvError) else EnvError(describe(error))


_BLOCKS = (
  "its async method blocks the event loop: no await within {:g} s. Call what blocks "
  "with asyncio.to_thread, or make the method a plain one"
)
_LOOKS = 3  # at a loop that does not answer, before it counts as blocked


class _Loop:
  """An event loop in a thread of its own."""

  def __init__(self):
    self._loop = asyncio.new_event_loop()
    self._asked: float | None = None  # when it got a question that it must answer
    self._looks = 0
    threading.Thread(
      target=self._loop.run_forever, name="tunix environments", daemon=True
    ).start()

  def start(self, coroutine: Any) -> Any:
    """Starts a coroutine; returns its future."""
    return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

  def current(self) -> asyncio.Task[Any] | None:
    """Returns the task that runs now; None if all of them wait."""
    return asyncio.current_task(self._loop)

  def blocked_by(self, seconds: float) -> asyncio.Task[Any] | None:
    """Returns the task that has kept the loop from answering; None if it answers.

    Several looks must find the loop silent: a process that did nothing at all for a
    while, such as one that compiled, had a loop that could not answer.
    """
    if self._asked is None:
      self._asked, self._looks = time.monotonic(), 0
      self._loop.call_soon_threadsafe(self._answer)
      return None
    self._looks += 1
    is_silent = time.monotonic() - self._asked >= seconds and self._looks >= _LOOKS
    return self.current() if is_silent else None

  def _answer(self) -> None:
    self._asked = None


class _Loops:
  """The event loop that coroutines of all environments share.

  It lives as long as the process, so that a client or a semaphore that was made in one
  batch works in the next.
  """

  def __init__(self):
    self._lock = threading.Lock()
    self._loop: _Loop | None = None

  def get(self) -> _Loop:
    with self._lock:
      if self._loop is None:
        self._loop = _Loop()
      return self._loop

  def abandon(self, loop: _Loop) -> None:
    """Gives later calls another loop; those that run go on in this one."""
    with self._lock:
      if self._loop is loop:
        self._loop = None


_LOOPS = _Loops()


async def in_thread(function: Callable[[], Any]) -> Any:
  """Calls a plain function in a thread, without blocking the loop.

  An awaitable that it returns is awaited in the loop.

  Raises:
    EnvError: the function raised.
  """

  def guarded() -> Any:
    try:
      return function()
    except EnvError:
      raise
    except BaseException as error:  # the function is the user's, as in `Calls`
      raise EnvError(describe(error)) from error

  result = await threads.result(guarded)
  return await result if inspect.isawaitable(result) else result
