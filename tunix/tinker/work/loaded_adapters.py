"""The checkpoints whose adapters the engine holds.

A checkpoint is loaded into the engine's bank of adapters when a request needs it, and
the least recently used one without open requests makes room for it.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any

from tunix.generate.engine.driver import Driver
from tunix.generate.engine.replicas import Replicas
from tunix.tinker.errors import TinkerError
from tunix.tinker.state import checkpoints
from tunix.tinker.state.checkpoints import Place

_LOAD_SECONDS = 600  # longest wait for the engine's thread
_LOOK_SECONDS = 1.0  # between two looks for room in the bank
_HANDED = 8  # adapters that stay in host memory after their hand-over


class LoadedAdapters:
  """Loads checkpoints into an engine.

  Args:
    driver: the started driver of the engine.
    load: returns the adapter of a checkpoint from disk.
  """

  def __init__(
    self, driver: Driver | Replicas, load: Callable[[Place], dict[str, Any]]
  ):
    self._driver, self._load = driver, load
    # Held for short times only: the event loop of the server may wait for it.
    self._changed = threading.Condition()
    self._loading = threading.Lock()  # one thread at a time changes the bank
    self._handed = collections.OrderedDict[str, dict[str, Any]]()
    # Loaded checkpoints, the least recently used first, with their open requests.
    self._used = collections.OrderedDict[str, int]()
    # Loaded checkpoints that were deleted and written anew under the same name.
    self._stale: set[str] = set()
    self._closes = False

  def hand_over(self, place: Place, adapters: dict[str, Any]) -> None:
    """Keeps a new adapter in memory for the first request that uses it."""
    with self._changed:
      self._handed[str(place)] = adapters
      if str(place) in self._used:
        self._stale.add(str(place))
      while len(self._handed) > _HANDED:
        self._handed.popitem(last=False)

  def use(self, path: str) -> None:
    """Waits until the engine holds a checkpoint; it stays until `release`.

    Raises:
      TinkerError: `close` was called.
      ValueError: the bank is too small for it.
    """
    while not self._take(path):
      with self._loading:
        has_room = self._is_ready(path) or self._fits(path)
      if not has_room:
        with self._changed:
          self._changed.wait(_LOOK_SECONDS)

  def release(self, path: str) -> None:
    """Ends a `use`."""
    with self._changed:
      self._used[path] -= 1
      self._changed.notify_all()

  def close(self) -> None:
    """Ends the threads that wait in `use`."""
    with self._changed:
      self._closes = True
      self._changed.notify_all()

  def _is_ready(self, path: str) -> bool:
    with self._changed:
      return self._is_loaded(path)

  def _is_loaded(self, path: str) -> bool:
    # The administrator can unload an adapter, which this object does not hear of.
    is_in_engine = path in self._driver.engine.adapters
    return is_in_engine and path in self._used and path not in self._stale

  def _take(self, path: str) -> bool:
    """Marks a checkpoint as used; returns False if it is not loaded."""
    with self._changed:
      if self._closes:
        raise TinkerError("the service ends: send the request again")
      if not self._is_loaded(path):
        return False
      self._used[path] += 1
      self._used.move_to_end(path)
    return True

  def _fits(self, path: str) -> bool:
    """Loads a checkpoint; returns False if it, or all others, must stay for now."""
    if not self._has_ended(path):
      return False
    with self._changed:
      adapters = self._handed.pop(path, None)
    if adapters is None:
      adapters = self._load(checkpoints.parse(path))
    while True:
      try:
        self._driver.call(lambda e: e.load_adapter(path, adapters), _LOAD_SECONDS)
        break
      except ValueError:
        with self._changed:
          idle = [name for name, used in self._used.items() if not used]
          is_full = bool(self._used)
        if not idle and not is_full:
          raise  # there is nothing that could make room
        if not idle or not self._has_ended(idle[0]):
          with self._changed:
            self._handed.setdefault(path, adapters)  # a newer one may have come
          return False
    with self._changed:
      self._used[path] = 0
      if path in self._handed:  # written anew while this one was loaded
        self._stale.add(path)
    return True

  def _has_ended(self, path: str) -> bool:
    """Takes a checkpoint out of the engine; returns False if requests use it."""
    with self._changed:
      if self._used.get(path):
        return False
      is_loaded = self._used.pop(path, None) is not None
      self._stale.discard(path)
    if is_loaded and path in self._driver.engine.adapters:
      self._driver.call(lambda e: e.unload_adapter(path), _LOAD_SECONDS)
    return True
