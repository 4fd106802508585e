"""Fair turns between tenants, counted in tokens and not in requests."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterable, Iterator


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


class Room:
  """Room for a number of completions, which tenants take in fair turns.

  Args:
    most: completions that have room at the same time.
  """

  def __init__(self, most: int):
    self.most = most
    self._used, self._turns, self._closes = 0, Turns(), False
    self._waiting: dict[str, collections.deque[object]] = {}
    self._changed = threading.Condition()

  @contextlib.contextmanager
  def taken(self, tenant: str, count: int, tokens: int) -> Iterator[None]:
    """Waits for room or for `close`, and gives the room back at the end.

    Args:
      tenant: whose turn is waited for.
      count: completions, at most `most`.
      tokens: tokens that the turn counts as.
    """
    place = object()
    with self._changed:
      self._waiting.setdefault(tenant, collections.deque()).append(place)
      self._changed.wait_for(lambda: self._closes or self._fits(tenant, place, count))
      self._waiting[tenant].remove(place)
      if not self._waiting[tenant]:
        del self._waiting[tenant]
      self._turns.charge(tenant, tokens)
      self._used += count
      self._changed.notify_all()  # there may be room for the next one as well
    try:
      yield
    finally:
      with self._changed:
        self._used -= count
        self._changed.notify_all()

  def close(self) -> None:
    """Ends all waits."""
    with self._changed:
      self._closes = True
      self._changed.notify_all()

  def _fits(self, tenant: str, place: object, count: int) -> bool:
    # Nobody overtakes the next one, or a large request would wait for ever.
    is_next = self._turns.next(self._waiting) == tenant
    is_first = self._waiting[tenant][0] is place
    return is_next and is_first and self._used + count <= self.most
