"""Fair turns between tenants, counted in tokens and not in requests."""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Turns:
  """Chooses who is next: the key that got the fewest tokens (Goyal et al. 1996).

  A key that was idle has saved nothing: it begins with the tokens of the others.
  """

  def __init__(self):
    self._got: dict[str, int] = {}
    self._now = 0  # tokens of the key that was served last, before its turn

  def next(self, keys: Iterable[str]) -> str:
    """Returns the key whose turn it is."""
    return min(keys, key=self._start)

  def charge(self, key: str, tokens: int) -> None:
    """Counts the tokens of a turn, when it begins."""
    self._now = self._start(key)
    self._got[key] = self._now + tokens

  def _start(self, key: str) -> int:
    return max(self._got.get(key, 0), self._now)


@dataclasses.dataclass(frozen=True)
class _Part:
  count: int
  tokens: int
  function: Callable[[], Any]
  future: Future[Any] = dataclasses.field(default_factory=Future)


class Room:
  """Threads for a number of completions, which tenants take in fair turns.

  Args:
    most: completions that have room at the same time, and number of the threads.
  """

  def __init__(self, most: int):
    self.most = most
    self._used, self._turns, self._closes = 0, Turns(), False
    self._waiting: dict[str, collections.deque[_Part]] = {}
    self._lock = threading.Lock()
    self._threads = ThreadPoolExecutor(most, "tinker samples")

  def submit(
    self, tenant: str, count: int, tokens: int, function: Callable[[], Any]
  ) -> Future[Any]:
    """Calls a function in a thread when there is room, or after `stop`.

    Args:
      tenant: whose turn is waited for.
      count: completions of the function, at most `most`.
      tokens: tokens that the turn counts as.
      function: the function.

    Returns:
      The future of its result. After a cancellation of the future, call `start_next`.
    """
    part = _Part(count, tokens, function)
    with self._lock:
      self._waiting.setdefault(tenant, collections.deque()).append(part)
    self.start_next()
    return part.future

  def start_next(self) -> None:
    """Starts the functions that have room, and forgets those that were cancelled."""
    with self._lock:
      while self._waiting:
        # No later request goes first: a large one could wait without end.
        tenant = self._turns.next(self._waiting)
        part = self._waiting[tenant][0]
        has_room = self._used + part.count <= self.most
        if not (has_room or self._closes or part.future.cancelled()):
          return
        self._waiting[tenant].popleft()
        if not self._waiting[tenant]:
          del self._waiting[tenant]
        if part.future.set_running_or_notify_cancel():
          self._turns.charge(tenant, part.tokens)
          self._used += part.count
          self._threads.submit(self._call, part)

  def stop(self) -> None:
    """Ends all waits."""
    with self._lock:
      self._closes = True
    self.start_next()

  def close(self) -> None:
    """Waits for the end of the threads."""
    self.stop()
    self._threads.shutdown(wait=True, cancel_futures=True)

  def _call(self, part: _Part) -> None:
    try:
      end = functools.partial(part.future.set_result, part.function())
    except BaseException as error:  # it reaches whoever reads the result
      end = functools.partial(part.future.set_exception, error)
    with self._lock:
      self._used -= part.count
    self.start_next()
    end()  # calls what waits for the result
