"""Processes that run reward functions and can be killed.

A call has a deadline. A process that misses it, or dies, is killed with everything it
started, and another takes its place: `RewardPool.run` comes back in bounded time
whatever a function does. All reading and writing is non-blocking, in one thread.

The processes are started from nothing, never forked: the trainer's process has JAX's
threads in it. They load `tunix.rl.reward_worker` and the functions' own modules, which
is why a function must be importable from a file.
"""

from __future__ import annotations

import collections
import dataclasses
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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tunix.rl import reward_worker
from tunix.rl.reward_outcomes import Failed, Outcome, TimedOut, describe, name_of
from tunix.utils import processes

START_TIMEOUT_S = 120.0  # to import what the functions need
_TICK_S = 0.2  # how often dead processes are looked for
_READS = 256  # of 64 KiB at once: one process must not keep us from the others
_STARTS = 3  # a worker that is killed while it starts is started again so often
# Bytes of an answer, and of one row of it; a process that sends more has gone wrong.
_LARGEST = 1 << 16
_LARGEST_ROW = 1 << 12


@dataclasses.dataclass(frozen=True)
class Call:
  """One call of a function.

  Attributes:
    function: its index in the pool.
    arguments: by name.
    count: rows, which is how many outcomes there will be.
  """

  function: int
  arguments: Mapping[str, Any]
  count: int


class RewardPool:
  """Runs calls of a fixed list of functions, `workers` at a time.

  Processes start with the first `run` and stay until `close`.
  """

  def __init__(
    self,
    functions: Sequence[Callable[..., Any]],
    *,
    workers: int,
    timeout_s: float,
    memory_bytes: int | None = None,
  ):
    """Takes the functions and the limits; starts nothing yet.

    Args:
      functions: picklable, which functions of a module are.
      workers: processes.
      timeout_s: seconds that a call may take.
      memory_bytes: address space that a process may take beyond what it has once the
        functions are loaded; None: no limit. Linux only.

    Raises:
      TypeError: a function cannot be pickled.
      ValueError: a memory limit where it cannot be kept.
    """
    if memory_bytes is not None and sys.platform != "linux":
      raise ValueError(
        f"memory_bytes={memory_bytes} on {sys.platform}: only Linux keeps such a "
        "limit; leave it out"
      )
    self._names = [name_of(f) for f in functions]
    self._count = workers
    self._timeout_s = timeout_s
    payload = _pickled_functions(functions)
    self._hello = pickle.dumps(
      {
        "main": _main_of(payload),
        "functions": payload,
        "timeout_s": timeout_s,
        "memory_bytes": memory_bytes,
      }
    )
    self._workers: list[_Worker] = []
    self._lock = threading.Lock()
    self._close = weakref.finalize(self, _kill_all, self._workers)

  def run(self, calls: Sequence[Call]) -> list[list[Outcome]]:
    """The outcomes of each call, in the order of `calls`.

    Returns within about `timeout_s * ceil(len(calls) / workers)` seconds, and what
    starting processes takes.

    Raises:
      TypeError: arguments cannot be pickled.
      RuntimeError: a process does not get ready (the functions cannot be loaded).
    """
    with self._lock:
      try:
        return self._run(calls)
      except BaseException:  # whatever it was, it goes on its way after the kill
        # Calls may be running whose answers nobody waits for any more.
        _kill_all(self._workers)
        raise

  def close(self) -> None:
    """Ends the processes. A later `run` starts new ones."""
    with self._lock:
      _kill_all(self._workers)

  def pids(self) -> list[int]:
    """Process ids of the workers that are alive."""
    return [w.process.pid for w in self._workers]

  def _run(self, calls: Sequence[Call]) -> list[list[Outcome]]:
    waiting = collections.deque(range(len(calls)))
    done: dict[int, list[Outcome]] = {}
    starts = 0
    while len(done) < len(calls):
      for worker in [w for w in self._workers if w.idle and w.exited()]:
        self._discard(worker)
      missing = min(self._count, len(calls) - len(done)) - len(self._workers)
      for _ in range(missing):
        self._workers.append(_Worker(self._hello))
      for worker in self._workers:
        if worker.idle and waiting:
          index = waiting.popleft()
          worker.give(index, self._message(calls[index]), self._timeout_s)
      _exchange(self._workers)
      for worker in list(self._workers):
        index = worker.call
        news = worker.news(self._largest(calls, index))
        if news is None:
          continue
        if index is None:
          starts = self._after_start(worker, news, starts)
        else:
          done[index] = self._after_call(worker, news, calls[index].count)
    return [done[i] for i in range(len(calls))]

  def _after_start(self, worker: _Worker, news: Any, starts: int) -> int:
    """Makes a worker idle, or says why there is none."""
    if news == {"ready": True}:
      worker.finish()
      return 0
    exit_code = self._discard(worker)
    if isinstance(news, Failed) and (exit_code or 0) < 0 and starts + 1 < _STARTS:
      return starts + 1  # killed from outside; it had no part in it
    if isinstance(news, TimedOut):
      why = f"it was not ready after {START_TIMEOUT_S:.0f} s"
    else:
      why = news.error if isinstance(news, Failed) else news["error"]
    raise RuntimeError(
      f"a reward worker cannot load {', '.join(self._names)}: {why}. Define reward "
      "functions in a module that can be imported; in a script, everything that starts "
      "the training belongs under `if __name__ == '__main__':`. workers=0 runs the "
      "functions in this process, without deadlines"
    )

  def _after_call(self, worker: _Worker, news: Any, count: int) -> list[Outcome]:
    if isinstance(news, list) and len(news) == count:
      worker.finish()
      return [reward_worker.from_json(x) for x in news]
    self._discard(worker)
    if isinstance(news, (Failed, TimedOut)):
      return [news] * count
    return [Failed("its process answered what was not asked")] * count

  def _discard(self, worker: _Worker) -> int | None:
    self._workers.remove(worker)
    return worker.kill()

  def _message(self, call: Call) -> bytes:
    try:
      arguments = pickle.dumps(dict(call.arguments))
    except Exception as error:  # objects may raise anything when pickled
      raise TypeError(
        f"the columns of {self._names[call.function]} cannot be sent to another "
        f"process: {describe(error)}; give text and numbers, or workers=0"
      ) from error
    return pickle.dumps((call.function, call.count, arguments))

  @staticmethod
  def _largest(calls: Sequence[Call], index: int | None) -> int:
    return _LARGEST + (0 if index is None else _LARGEST_ROW * calls[index].count)


class _Worker:
  """A process and our end of its socket: starting, idle, or in a call."""

  def __init__(self, hello: bytes):
    if reward_worker.MAIN_NAME in sys.modules:
      raise RuntimeError(
        "a reward worker that loads this script is asked to compute rewards: put what "
        "starts the training under `if __name__ == '__main__':`"
      )
    ours, theirs = socket.socketpair()
    with theirs:
      code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from tunix.rl import reward_worker; reward_worker.main({theirs.fileno()})"
      )
      self.process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,  # one group, killed with all that a function started
      )
    ours.setblocking(False)
    self.socket = ours
    self.call: int | None = None
    self.deadline: float | None = None  # on the monotonic clock
    self._seconds = 0.0
    self._inbox = bytearray()
    self._outbox = memoryview(b"")
    self._ended = False
    self._send(hello, START_TIMEOUT_S)

  @property
  def idle(self) -> bool:
    return self.deadline is None

  @property
  def interest(self) -> int:
    """What to wait for on the socket."""
    return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)

  def give(self, call: int, message: bytes, seconds: float) -> None:
    self.call = call
    self._send(message, seconds)

  def finish(self) -> None:
    self.call = self.deadline = None

  def exchange(self) -> None:
    """Writes and reads what is possible without waiting."""
    try:
      if self._outbox:
        self._outbox = self._outbox[self.socket.send(self._outbox) :]
    except BlockingIOError:
      pass
    except OSError:
      self._ended = True
    try:
      for _ in range(_READS):
        part = self.socket.recv(1 << 16)
        self._inbox += part
        self._ended |= not part
        if not part:
          break
    except BlockingIOError:
      pass
    except OSError:
      self._ended = True

  def news(self, largest: int) -> Any:
    """An answer, Failed, TimedOut, or None: nothing yet."""
    if self.deadline is None:
      return None
    gone = self._ended or self.exited()
    if gone:
      self.exchange()  # what it wrote before it ended
    size = reward_worker.HEADER.size
    if len(self._inbox) >= size:
      (length,) = reward_worker.HEADER.unpack(self._inbox[:size])
      if length > largest:
        return Failed(
          f"its process answered {length} bytes, which is no list of rewards"
        )
      if len(self._inbox) >= size + length:
        return self._answer(size, length)
    if gone:
      return Failed(self._end())
    if time.monotonic() >= self.deadline:
      return TimedOut(self._seconds)
    return None

  def exited(self) -> bool:
    """Whether the process has ended; it keeps its id until `kill`."""
    return processes.has_ended(self.process)

  def kill(self) -> int | None:
    """Ends the process and its children; its exit code."""
    self.socket.close()
    return processes.kill_group(self.process)

  def _send(self, message: bytes, seconds: float) -> None:
    self._outbox = memoryview(reward_worker.HEADER.pack(len(message)) + message)
    self._seconds = seconds
    self.deadline = time.monotonic() + seconds

  def _answer(self, size: int, length: int) -> Any:
    text = bytes(self._inbox[size : size + length])
    del self._inbox[: size + length]
    try:
      return json.loads(text)
    except (ValueError, RecursionError):
      return Failed("its process answered something that is no list of rewards")

  def _end(self) -> str:
    """How the process ended."""
    for _ in range(50):
      if self.exited():
        break
      time.sleep(0.01)  # the socket closes a little before the process is gone
    else:
      return "its process closed the connection without an answer"
    code = self.kill() or 0
    if code < 0:
      name = signal.Signals(-code).name
      return f"its process was ended by {name} (from outside, or by lack of memory)"
    return f"its process ended with exit code {code}"


def _exchange(workers: Sequence[_Worker]) -> None:
  """Waits for news from the workers in a call, not beyond the first deadline."""
  busy = [w for w in workers if w.deadline is not None]
  now = time.monotonic()
  wait = min([_TICK_S, *(w.deadline - now for w in busy if w.deadline is not None)])
  with selectors.DefaultSelector() as selector:
    for worker in busy:
      selector.register(worker.socket, worker.interest, worker)
    for key, _ in selector.select(max(wait, 0)):
      key.data.exchange()


def _kill_all(workers: list[_Worker]) -> None:
  while workers:
    workers.pop().kill()


def _pickled_functions(functions: Sequence[Callable[..., Any]]) -> bytes:
  for function in functions:
    try:
      payload = pickle.dumps(function)
    except Exception as error:  # objects may raise anything when pickled
      raise TypeError(_unpicklable(function, describe(error))) from error
    if b"__main__" in payload and _main_of(payload)[0] == "nothing":
      raise TypeError(_unpicklable(function, "it is defined in an interactive session"))
  return pickle.dumps(list(functions))


def _unpicklable(function: Callable[..., Any], why: str) -> str:
  return (
    f"the reward function {name_of(function)} cannot be sent to a worker: {why}. "
    "Define it at the top level of a module (no lambda, no function inside a "
    "function), or give workers=0 to run it in this process, without deadlines"
  )


def _main_of(payload: bytes) -> tuple[str, str]:
  """How a worker finds the script that pickled functions are defined in, if one is."""
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
