"""Ctrl-C and SIGTERM that wait for a safe place."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
  """A run was asked to stop and did so at a step boundary.

  Attributes:
    signum: the signal, `signal.SIGINT` or `signal.SIGTERM`.
  """

  def __init__(self, signum: int, message: str):
    super().__init__(message)
    self.signum = signum


class DeferredSignals:
  """Remembers SIGINT and SIGTERM instead of raising in the middle of a step.

  An exception between the return of a donating computation and the assignment of its
  result would lose the state. A second signal acts at once: the old handlers are put
  back by the first. A signal that nobody answered with an interrupt is delivered on
  leaving the block. A signal that is ignored stays so. Outside the main thread, where
  Python allows no handlers, nothing is deferred.
  """

  def __init__(self) -> None:
    self.pending: int | None = None
    self._old: dict[int, Any] = {}

  def __enter__(self) -> DeferredSignals:
    if threading.current_thread() is threading.main_thread():
      for signum in _SIGNALS:
        if signal.getsignal(signum) is signal.SIG_IGN:  # by nohup, or a script's `&`
          continue
        self._old[signum] = signal.signal(signum, self._remember)
    return self

  def __exit__(self, kind: object, error: object, traceback: object) -> None:
    self._restore()
    if self.pending is not None and not isinstance(error, KeyboardInterrupt):
      signal.raise_signal(self.pending)

  def _remember(self, signum: int, frame: FrameType | None) -> None:
    del frame
    self.pending = signum
    self._restore()

  def _restore(self) -> None:
    while self._old:
      signum, handler = self._old.popitem()
      signal.signal(signum, signal.SIG_DFL if handler is None else handler)
