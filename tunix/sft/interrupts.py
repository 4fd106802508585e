"""Ctrl-C and SIGTERM that take effect between two steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
  """Tells that a signal has stopped a run, after a complete step.

  Attributes:
    signum: the signal, `signal.SIGINT` or `signal.SIGTERM`.
  """

  def __init__(self, signum: int, message: str):
    super().__init__(message)
    self.signum = signum


class DeferredSignals:
  """Context that records SIGINT and SIGTERM instead of interrupting a step.

  A KeyboardInterrupt between the end of a donating computation and the assignment of
  its result would lose the arrays. The first signal is recorded, and restores the old
  handlers, so that a second signal takes effect at once. If the block does not end with
  a KeyboardInterrupt, the recorded signal is delivered at its end. Ignored signals stay
  ignored. Outside the main thread nothing is deferred, because Python allows no
  handlers there.

  Attributes:
    pending: the recorded signal; None if there is none.
  """

  def __init__(self) -> None:
    self.pending: int | None = None
    self._old: dict[int, Any] = {}

  def __enter__(self) -> DeferredSignals:
    if threading.current_thread() is threading.main_thread():
      for signum in _SIGNALS:
        if signal.getsignal(signum) is signal.SIG_IGN:  # set by nohup or by `&`
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
