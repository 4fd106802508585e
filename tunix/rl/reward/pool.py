"""Worker processes that run reward functions and can be killed.

Each call has a deadline. A process that misses it, or ends, is killed together with its
children, and a new process replaces it. `RewardPool.run` therefore returns in bounded
time, even if a function hangs. One thread does all reading and writing, without
blocking.

The processes are new interpreters, because a fork is unsafe while the threads of JAX
run in the trainer's process. They import `tunix.rl.reward.worker` and the modules of
the functions, so a function must be importable from a file.
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

from tunix.rl.reward import worker as reward_worker
from tunix.rl.reward.outcomes import Failed, Outcome, TimedOut, describe, name_of
from tunix.utils import processes

START_TIMEOUT_S = 120.0  # for the imports of the functions' modules
_TICK_S = 0.2  # interval of the checks for ended processes
# Largest number of reads from one process in a row. 256 reads of 64 KiB are 16 MiB: a
# process that writes without end must not keep the pool from reading the others.
_READS = 256
_STARTS = 3  # attempts to start a worker, if the system kills it while it starts
# An answer has at most 64 KiB, plus 4 KiB per row: a number takes at most 25 bytes, and
# an error message at most 400 characters.
_MAX_ANSWER = 1 << 16
_MAX_ROW = 1 << 12


@dataclasses.dataclass(frozen=True)
class Call:
  """One call of a function.

  Attributes:
    function: index of the function in the pool.
    arguments: arguments by name.
    count: number of rows, which is the number of outcomes.
  """

  function: int
  arguments: Mapping[str, Any]
  count: int


class RewardPool:
  """Runs calls of a fixed list of functions in up to `workers` processes.

  Processes start at the first `run` and stay until `close`.
  """

  def __init__(
    self,
    functions: Sequence[Callable[..., Any]],
    *,
    workers: int,
    timeout_s: float,
    memory_bytes: int | None = None,
  ):
    """Initializes the pool without starting a process.

    Args:
      functions: picklable functions, such as functions of a module.
      workers: largest number of processes.
      timeout_s: largest duration of a call in seconds.
      memory_bytes: address space in bytes that a process may use in addition to what it
        uses after loading its functions; None for no limit. Linux only.

    Raises:
      TypeError: a function cannot be pickled.
      ValueError: `memory_bytes` is set on another platform than Linux.
    """
    if memory_bytes is not None and sys.platform != "linux":
      raise ValueError(
        f"memory_bytes is {memory_bytes} on {sys.platform}: only Linux can enforce it; "
        "leave it out"
      )
    self._names = [name_of(f) for f in functions]
    self._count = workers
    self._timeout_s = timeout_s
    payload = _pickled_functions(functions)
    self._hello = pickle.dumps(
      {
        "main": main_of(payload),
        "functions": payload,
        "timeout_s": timeout_s,
        "memory_bytes": memory_bytes,
      }
    )
    self._workers: list[_Worker] = []
    self._lock = threading.Lock()
    self._close = weakref.finalize(self, _kill_all, self._workers)

  def run(self, calls: Sequence[Call]) -> list[list[Outcome]]:
    """Returns the outcomes of each call, in the order of `calls`.

    It takes at most about `timeout_s * ceil(len(calls) / workers)` seconds, plus the
    time to start processes.

    Raises:
      TypeError: arguments cannot be pickled.
      RuntimeError: a process cannot load the functions.
    """
    with self._lock:
      try:
        return self._run(calls)
      except BaseException:
        # A worker may be inside a call whose answer this run will not read. A later run
        # would read that answer as the answer to its own call.
        _kill_all(self._workers)
        raise

  def close(self) -> None:
    """Ends the processes; a later `run` starts new ones."""
    with self._lock:
      _kill_all(self._workers)

  def pids(self) -> list[int]:
    """Returns the process ids of the running workers."""
    return [w.process.pid for w in self._workers]

  def _run(self, calls: Sequence[Call]) -> list[list[Outcome]]:
    waiting = collections.deque(range(len(calls)))
    done: dict[int, list[Outcome]] = {}
    starts = 0
    while len(done) < len(calls):
      # Each round replaces ended workers, gives calls to idle ones, waits for data, and
      # reads answers and missed deadlines.
      for worker in [w for w in self._workers if w.idle and w.exited()]:
        self._discard(worker)
      missing = min(self._count, len(calls) - len(done)) - len(self._workers)
      for _ in range(missing):
        self._workers.append(_Worker(self._hello))
      for worker in self._workers:
        if worker.idle and waiting:
          index = waiting.popleft()
          worker.start(index, self._message(calls[index]), self._timeout_s)
      _exchange(self._workers)
      for worker in list(self._workers):
        index = worker.call
        rows = 0 if index is None else calls[index].count
        answer = worker.answer(_MAX_ANSWER + _MAX_ROW * rows)
        if answer is None:
          continue
        if index is None:
          starts = self._after_start(worker, answer, starts)
        else:
          done[index] = self._after_call(worker, answer, rows)
    return [done[i] for i in range(len(calls))]

  def _after_start(self, worker: _Worker, answer: Any, starts: int) -> int:
    """Makes a started worker idle; returns the number of failed starts in a row.

    Raises:
      RuntimeError: the worker could not load the functions.
    """
    if answer == {"ready": True}:
      worker.finish()
      return 0
    exit_code = self._discard(worker)
    if isinstance(answer, Failed) and (exit_code or 0) < 0 and starts + 1 < _STARTS:
      return starts + 1  # by a signal, for example from the out-of-memory killer
    if isinstance(answer, TimedOut):
      why = f"it was not ready after {START_TIMEOUT_S:.0f} s"
    else:
      why = answer.error if isinstance(answer, Failed) else answer["error"]
    raise RuntimeError(
      f"a reward worker cannot load {', '.join(self._names)}: {why}. Define reward "
      "functions in a module that can be imported; in a script, put the code that "
      "starts the training under `if __name__ == '__main__':`. workers=0 runs the "
      "functions in this process, without deadlines"
    )

  def _after_call(self, worker: _Worker, answer: Any, count: int) -> list[Outcome]:
    if isinstance(answer, list) and len(answer) == count:
      worker.finish()
      return [reward_worker.from_json(x) for x in answer]
    self._discard(worker)
    if not isinstance(answer, (Failed, TimedOut)):
      answer = Failed("its process sent an unexpected answer")
    return [answer] * count

  def _discard(self, worker: _Worker) -> int | None:
    self._workers.remove(worker)
    return worker.kill()

  def _message(self, call: Call) -> bytes:
    try:
      arguments = pickle.dumps(dict(call.arguments))
    except Exception as error:  # user objects may raise any exception here
      raise TypeError(
        f"the columns of {self._names[call.function]} cannot be sent to another "
        f"process: {describe(error)}; use text and numbers, or workers=0"
      ) from error
    return pickle.dumps((call.function, call.count, arguments))


class _Worker:
  """A worker process and the pool's end of its socket.

  A worker is starting, idle or in a call. It has a deadline unless it is idle. Messages
  consist of a header, the length in bytes, and the content.
  """

  def __init__(self, hello: bytes):
    if reward_worker.MAIN_NAME in sys.modules:
      raise RuntimeError(
        "a reward worker loads this script, which starts the training again: put the "
        "code that starts it under `if __name__ == '__main__':`"
      )
    pool_end, worker_end = socket.socketpair()
    with worker_end:
      code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from tunix.rl.reward import worker; worker.main({worker_end.fileno()})"
      )
      self.process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        pass_fds=[worker_end.fileno()],
        start_new_session=True,  # a process group, which is killed as a whole
      )
    pool_end.setblocking(False)
    self.socket = pool_end
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
    """The events of the socket to wait for."""
    return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)

  def start(self, call: int, message: bytes, seconds: float) -> None:
    self.call = call
    self._send(message, seconds)

  def finish(self) -> None:
    self.call = self.deadline = None

  def exchange(self) -> None:
    """Writes and reads without waiting."""
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

  def answer(self, max_bytes: int) -> Any:
    """Returns the parsed JSON of an answer of at most `max_bytes`, or its failure.

    A failure is `Failed` or `TimedOut`. None: the worker may still answer.
    """
    if self.deadline is None:
      return None
    ended = self._ended or self.exited()
    if ended:
      self.exchange()  # reads what the process wrote before it ended
    size = reward_worker.HEADER.size
    if len(self._inbox) >= size:
      (length,) = reward_worker.HEADER.unpack(self._inbox[:size])
      if length > max_bytes:
        return Failed(
          f"its process answered {length} bytes, which is no list of rewards"
        )
      if len(self._inbox) >= size + length:
        return self._parsed(size, length)
    if ended:
      return Failed(self._exit_reason())
    if time.monotonic() >= self.deadline:
      return TimedOut(self._seconds)
    return None

  def exited(self) -> bool:
    """Returns True if the process has ended. Its id is not reused before `kill`."""
    return processes.has_ended(self.process)

  def kill(self) -> int | None:
    """Ends the process and its children; returns its exit code."""
    self.socket.close()
    return processes.kill_group(self.process)

  def _send(self, message: bytes, seconds: float) -> None:
    self._outbox = memoryview(reward_worker.HEADER.pack(len(message)) + message)
    self._seconds = seconds
    self.deadline = time.monotonic() + seconds

  def _parsed(self, size: int, length: int) -> Any:
    text = bytes(self._inbox[size : size + length])
    del self._inbox[: size + length]
    try:
      return json.loads(text)
    except (ValueError, RecursionError):
      return Failed("its process sent an answer that is no JSON")

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


def _exchange(workers: Sequence[_Worker]) -> None:
  """Waits for data of the busy workers, at most until the first deadline."""
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
    except Exception as error:  # user objects may raise any exception here
      raise TypeError(_unpicklable(function, describe(error))) from error
    if main_of(payload)[0] == "nothing":
      raise TypeError(_unpicklable(function, "it is defined in an interactive session"))
  return pickle.dumps(list(functions))


def _unpicklable(function: Callable[..., Any], why: str) -> str:
  return (
    f"the reward function {name_of(function)} cannot be sent to a worker: {why}. "
    "Define it at the top level of a module (no lambda, no function inside a "
    "function), or set workers=0 to run it in this process, without deadlines"
  )


def main_of(payload: bytes) -> tuple[str, str]:
  """Returns how a worker finds the script in which pickled functions are defined.

  Returns:
    (kind, name or path). The kind is "none" if no function is defined in `__main__`,
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
