"""Ctrl-C and SIGTERM that take effect between two steps."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Seconds that Python has to act on a second signal, before the process is ended.
_GRACE = 1.0


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
  its result would lose the arrays. The first signal is recorded, and a line on standard
  error says so at once. A second signal reaches the old handlers. If the main thread
  does not return to Python within a second (a compilation can take minutes), the second
  signal ends the process. If the block does not end with a KeyboardInterrupt, the
  recorded signal is delivered at its end. Ignored signals stay ignored. Outside the
  main thread nothing is deferred, because Python allows no handlers there.

  Attributes:
    pending: the recorded signal; None if there is none.
  """

  def __init__(self) -> None:
    self.pending: int | None = None
    self._old: dict[int, Any] = {}
    self._watcher: _Watcher | None = None

  def __enter__(self) -> DeferredSignals:
    if threading.current_thread() is threading.main_thread():
      for signum in _SIGNALS:
        if signal.getsignal(signum) is signal.SIG_IGN:  # set by nohup or by `&`
          continue
        self._old[signum] = signal.signal(signum, self._remember)
    if self._old:
      self._watcher = _Watcher()
    return self

  def __exit__(self, kind: object, error: object, traceback: object) -> None:
    self._restore()
    if self._watcher is not None:
      self._watcher.close()
    if self.pending is not None and not isinstance(error, KeyboardInterrupt):
      signal.raise_signal(self.pending)

  def _remember(self, signum: int, frame: FrameType | None) -> None:
    del frame
    if self._watcher is not None:  # a signal may arrive within __enter__
      self._watcher.has_recorded.set()
    if self.pending is None:
      self.pending = signum
      return
    assert self._watcher is not None
    self._watcher.has_acted.set()
    self._restore()
    signal.raise_signal(signum)

  def _restore(self) -> None:
    while self._old:
      signum, handler = self._old.popitem()
      signal.signal(signum, signal.SIG_DFL if handler is None else handler)


class _Watcher:
  """Answers signals in a thread, also while the main thread does not run Python.

  Python calls a handler between two instructions of the main thread, so a handler has
  to wait for a compilation. The interpreter writes the number of each signal to a
  socket as soon as it arrives, and the thread reads the socket.

  A forked child would write the signals that it gets to the socket of its parent, so
  it forgets the socket.

  Attributes:
    has_recorded: set when Python has called the handler.
    has_acted: set when Python has delivered the second signal.
  """

  def __init__(self) -> None:
    self.has_recorded = threading.Event()
    self.has_acted = threading.Event()
    self._reader, self._writer = socket.socketpair()
    self._writer.setblocking(False)
    self._before = signal.set_wakeup_fd(
      self._writer.fileno(), warn_on_full_buffer=False
    )
    self._thread = threading.Thread(target=self._answer, daemon=True)
    self._thread.start()

  def _answer(self) -> None:
    is_first = True
    while number := self._reader.recv(1):
      if (signum := number[0]) not in _SIGNALS:
        continue
      if is_first:
        _announce(signum)
        is_first = False
      elif not self._acts_on(signum):
        os._exit(128 + signum)

  def _acts_on(self, signum: int) -> bool:
    """Waits for the second signal's effect; returns False if the program is stuck."""
    if not self.has_recorded.wait(_GRACE):
      return False
    if self.has_acted.wait(_GRACE / 2):
      return True
    # Python calls a handler once for equal signals that arrive before the call.
    os.kill(os.getpid(), signum)
    return self.has_acted.wait(_GRACE / 2)

  def close(self) -> None:
    signal.set_wakeup_fd(self._before)
    self.has_acted.set()  # the block has ended: nothing is left to end
    self._writer.close()
    self._thread.join()
    self._reader.close()


def _announce(signum: int) -> None:
  again = "press Ctrl-C" if signum == signal.SIGINT else "send SIGTERM"
  text = f"stopping after this step; {again} again to end now"
  # Standard error may be None, closed, or a pipe that nobody reads.
  with contextlib.suppress(AttributeError, OSError, ValueError):
    begin = "\n" if sys.stderr.isatty() else ""  # below the bar
    print(f"{begin}tunix: {text}", file=sys.stderr, flush=True)


os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
