"""Processes that call a function and can be killed.

Each call has a deadline: in bounded time it has an answer, or a reason why there is
none. A child that misses its deadline, or ends, is discarded with all its children.
This isolates faults. It is not a sandbox against malicious code, see `jail` for one.

The processes are new interpreters, because a fork is unsafe while the threads of JAX
run in this process. They import `child_main` and the modules of the function, so the
function must be importable from a file.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from tunix.sandbox import child_main
from tunix.sandbox.errors import describe
from tunix.utils import processes

START_TIMEOUT_S = 120.0  # for the imports of the function's modules
_TICK_S = 0.2  # interval of the checks for ended processes
# Largest number of reads from one process in a row. 256 reads of 64 KiB are 16 MiB: a
# process that writes without end must not keep this one from reading the others.
_READS = 256


class ChildError(RuntimeError):
  """A child gave no answer that can be read; the message says why."""


class Children:
  """Processes of one function, which end when this object does.

  Attributes:
    running: the processes that were started and not discarded.
  """

  def __init__(
    self,
    function: Callable[..., Any],
    *,
    timeout_s: float,
    memory_bytes: int | None = None,
  ):
    """Checks the arguments without starting a process.

    Args:
      function: picklable function, whose results are JSON.
      timeout_s: most seconds of a call.
      memory_bytes: address space in bytes that a process may use in addition to what it
        uses after loading the function; None: no limit. Linux only.

    Raises:
      TypeError: the function cannot be sent to a process; the message says why.
      ValueError: `memory_bytes` is set on another platform than Linux.
    """
    if memory_bytes is not None and sys.platform != "linux":
      raise ValueError(
        f"memory_bytes is {memory_bytes} on {sys.platform}: only Linux can enforce it; "
        "leave it out"
      )
    payload = pickled(function)
    hello = {"main": _main_of(payload), "function": payload}
    self._hello = pickle.dumps(
      hello | {"timeout_s": timeout_s, "memory_bytes": memory_bytes}
    )
    self._timeout_s = timeout_s
    self.running: list[Child] = []
    weakref.finalize(self, _kill_all, self.running)

  def start(self) -> Child:
    """Starts a process. Its first answer comes when it has loaded the function."""
    child = Child(self._hello, self._timeout_s)
    self.running.append(child)
    return child

  def discard(self, child: Child) -> int | None:
    """Kills a process, see `Child.kill`; `start` replaces it."""
    with contextlib.suppress(ValueError):  # another thread closes all of them
      self.running.remove(child)
    return child.kill()

  def close(self) -> None:
    """Kills all processes; `start` starts new ones."""
    _kill_all(self.running)


class Child:
  """A process that answers one message after another, and our end of its socket.

  A child is starting, idle or in a call. It has a deadline unless it is idle. Messages
  consist of a header, the length in bytes, and the content.
  """

  def __init__(self, hello: bytes, timeout_s: float):
    if child_main.MAIN_NAME in sys.modules:
      raise RuntimeError(
        "a process for calls loads this script, which starts the training again: put "
        "the code that starts it under `if __name__ == '__main__':`"
      )
    ours, theirs = socket.socketpair()
    with theirs:
      code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from tunix.sandbox import child_main; child_main.main({theirs.fileno()})"
      )
      self._process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,  # a process group, which is killed as a whole
      )
    ours.setblocking(False)
    self._socket = ours
    self._timeout_s = timeout_s
    self._deadline: float | None = None  # on the monotonic clock
    self._seconds = 0.0
    self._inbox = bytearray()
    self._outbox = memoryview(b"")
    self._has_ended = self._is_killed = False
    self._kill_lock = threading.Lock()
    self._send(hello, START_TIMEOUT_S)

  @property
  def pid(self) -> int:
    return self._process.pid

  @property
  def is_idle(self) -> bool:
    return self._deadline is None

  def send(self, *arguments: object) -> None:
    """Begins a call of the function in an idle child.

    Raises:
      ChildError: the process was killed.
      Exception: any that the arguments raise when they are pickled.
    """
    message = pickle.dumps(arguments)
    if self._is_killed:
      raise ChildError("its process has ended")
    self._send(message, self._timeout_s)

  def answer(self, max_bytes: int) -> dict[str, Any] | None:
    """Returns the answer to the last message if it is there, without waiting.

    Args:
      max_bytes: most bytes of the answer's JSON.

    Returns:
      {"ok": result} or {"error": text of an exception}, and the child is idle. None: it
      may still answer, or it is idle.

    Raises:
      ChildError: the process ended, or sent something else.
      TimeoutError: the deadline is over.
    """
    if self._deadline is None:
      return None
    has_ended = self._has_ended or self.exited()
    if has_ended:
      self._exchange()  # reads what the process wrote before it ended
    size = child_main.HEADER.size
    if len(self._inbox) >= size:
      (length,) = child_main.HEADER.unpack(self._inbox[:size])
      if length > max_bytes:
        raise ChildError(
          f"its process answered {length} bytes; expected at most {max_bytes}"
        )
      if len(self._inbox) >= size + length:
        return self._parsed(size, length)
    if has_ended:
      raise ChildError(self._exit_reason())
    if time.monotonic() >= self._deadline:
      raise TimeoutError(f"no answer within {self._seconds:g} s")
    return None

  def wait(self, max_bytes: int) -> dict[str, Any]:
    """Does what `answer` does, and waits for the answer or the deadline."""
    while (answer := self.answer(max_bytes)) is None:
      # Another thread may have killed the child, which the next look finds.
      with contextlib.suppress(ValueError):
        exchange([self])
    return answer

  def exited(self) -> bool:
    """Returns True if the process has ended. Its id is not reused before `kill`."""
    return processes.has_ended(self._process)

  def kill(self) -> int | None:
    """Ends the process and its children; returns its exit code."""
    # The second of two threads must not signal an id that the first has released.
    with self._kill_lock:
      self._has_ended = self._is_killed = True
      self._socket.close()
      return processes.kill_group(self._process)

  def _send(self, message: bytes, seconds: float) -> None:
    self._outbox = memoryview(child_main.HEADER.pack(len(message)) + message)
    self._seconds = seconds
    self._deadline = time.monotonic() + seconds

  def _exchange(self) -> None:
    """Writes and reads without waiting."""
    try:
      if self._outbox:
        self._outbox = self._outbox[self._socket.send(self._outbox) :]
    except BlockingIOError:
      pass
    except OSError:
      self._has_ended = True
    try:
      for _ in range(_READS):
        part = self._socket.recv(1 << 16)
        self._inbox += part
        self._has_ended |= not part
        if not part:
          break
    except BlockingIOError:
      pass
    except OSError:
      self._has_ended = True

  def _parsed(self, size: int, length: int) -> dict[str, Any]:
    text = bytes(self._inbox[size : size + length])
    del self._inbox[: size + length]
    try:
      answer = json.loads(text)
    except (ValueError, RecursionError) as error:
      raise ChildError("its process sent an answer that is no JSON") from error
    if not isinstance(answer, dict) or not {"ok", "error"} & answer.keys():
      raise ChildError("its process sent an unexpected answer")
    self._deadline = None
    return answer

  def _exit_reason(self) -> str:
    """Describes how the process ended."""
    for _ in range(50):
      if self.exited():
        break
      time.sleep(0.01)  # the socket closes shortly before the process has ended
    else:
      return "its process closed the connection without an answer"
    code = self.kill() or 0
    if code < 0:
      name = signal.Signals(-code).name
      return f"its process was ended by {name} (from outside, or by lack of memory)"
    return f"its process ended with exit code {code}"


def exchange(children: Sequence[Child]) -> None:
  """Writes to and reads from busy children.

  It waits until one of them is ready, at most until the first deadline or 0.2 s.
  """
  now = time.monotonic()
  wait = _TICK_S
  with selectors.PollSelector() as selector:
    for child in children:
      if child._deadline is not None:
        wait = min(wait, child._deadline - now)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if child._outbox else 0)
        selector.register(child._socket, events, child)
    for key, _ in selector.select(max(wait, 0)):
      key.data._exchange()


def pickled(function: Callable[..., Any]) -> bytes:
  """Returns the pickle of a function for another process.

  Raises:
    TypeError: it cannot be pickled, or not be found there; the message says why.
  """
  try:
    payload = pickle.dumps(function)
  except Exception as error:  # user objects may raise any exception here
    raise TypeError(describe(error)) from error
  if _main_of(payload)[0] == "nothing":
    raise TypeError("it is defined in an interactive session")
  return payload


def _kill_all(running: list[Child]) -> None:
  while running:
    running.pop().kill()


def _main_of(payload: bytes) -> tuple[str, str]:
  """Returns how a process finds the script in which a pickled function is defined.

  Returns:
    (kind, name or path). The kind is "none" if no part is defined in `__main__`,
    "module" or "path" for a script, "nothing" for an interactive session.
  """
  if b"__main__" not in payload:
    return "none", ""
  main = sys.modules["__main__"]
  spec = getattr(main, "__spec__", None)
  file = getattr(main, "__file__", None)
  if spec is not None:
    return "module", spec.name
  if file is not None and pathlib.Path(file).exists():
    return "path", str(pathlib.Path(file).absolute())
  return "nothing", ""
