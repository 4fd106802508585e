"""Worker processes that run reward functions and can be killed.

Each call has a deadline (`tunix.sandbox.child`): a process that misses it, or ends, is
replaced by a new one. `RewardPool.run` therefore returns in bounded time, even if a
function hangs. One thread does all reading and writing, without blocking.

The processes import this file, so it imports nothing that is slow to load.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tunix.rl.reward import outcomes as reward_outcomes
from tunix.rl.reward.outcomes import Failed, Outcome, TimedOut, Value, name_of
from tunix.sandbox import child as child_lib
from tunix.sandbox.child import Child, ChildError, Children
from tunix.sandbox.errors import describe

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
    self._names = [name_of(f) for f in functions]
    self._count = workers
    self._timeout_s = timeout_s
    for function in functions:
      try:
        child_lib.pickled(function)
      except TypeError as error:
        raise TypeError(
          f"the reward function {name_of(function)} cannot be sent to a worker: "
          f"{error}. Define it at the top level of a module (no lambda, no function "
          "inside a function), or set workers=0 to run it in this process, without "
          "deadlines"
        ) from error
    self._children = Children(
      functools.partial(_outcomes, [*functions]),
      timeout_s=timeout_s,
      memory_bytes=memory_bytes,
    )
    self._lock = threading.Lock()

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
        self._children.close()
        raise

  def close(self) -> None:
    """Ends the processes; a later `run` starts new ones."""
    with self._lock:
      self._children.close()

  def pids(self) -> list[int]:
    """Returns the process ids of the running workers."""
    return [worker.pid for worker in self._children.running]

  def _run(self, calls: Sequence[Call]) -> list[list[Outcome]]:
    workers = self._children.running
    waiting = collections.deque(range(len(calls)))
    inside: dict[Child, int] = {}  # the call that a worker runs
    done: dict[int, list[Outcome]] = {}
    starts = 0
    while len(done) < len(calls):
      # Each round replaces ended workers, gives calls to idle ones, waits for data, and
      # reads answers and missed deadlines.
      for worker in [w for w in workers if w.is_idle and w.exited()]:
        self._children.discard(worker)
      for _ in range(min(self._count, len(calls) - len(done)) - len(workers)):
        self._children.start()
      for worker in workers:
        if worker.is_idle and waiting:
          inside[worker] = waiting.popleft()
          worker.send(*self._arguments(calls[inside[worker]]))
      child_lib.exchange(workers)
      for worker in list(workers):
        index = inside.get(worker)
        rows = 0 if index is None else calls[index].count
        answer = self._answer(worker, rows)
        if answer is None:
          continue
        if index is None:
          starts = self._after_start(worker, answer, starts)
        else:
          done[inside.pop(worker)] = self._after_call(worker, answer, rows)
    return [done[i] for i in range(len(calls))]

  def _answer(
    self, worker: Child, rows: int
  ) -> dict[str, Any] | Failed | TimedOut | None:
    """Returns an answer or its failure; None: the worker may still answer."""
    try:
      return worker.answer(_MAX_ANSWER + _MAX_ROW * rows)
    except TimeoutError:
      return TimedOut(self._timeout_s)
    except ChildError as error:
      return Failed(str(error))

  def _after_start(self, worker: Child, answer: Any, starts: int) -> int:
    """Discards a worker that did not start; returns the number of them in a row.

    Raises:
      RuntimeError: the worker could not load the functions.
    """
    if answer == {"ok": None}:
      return 0
    exit_code = self._children.discard(worker)
    if isinstance(answer, Failed) and (exit_code or 0) < 0 and starts + 1 < _STARTS:
      return starts + 1  # by a signal, for example from the out-of-memory killer
    if isinstance(answer, TimedOut):
      why = f"it was not ready after {child_lib.START_TIMEOUT_S:.0f} s"
    else:
      why = answer.error if isinstance(answer, Failed) else answer["error"]
    raise RuntimeError(
      f"a reward worker cannot load {', '.join(self._names)}: {why}. Define reward "
      "functions in a module that can be imported; in a script, put the code that "
      "starts the training under `if __name__ == '__main__':`. workers=0 runs the "
      "functions in this process, without deadlines"
    )

  def _after_call(self, worker: Child, answer: Any, count: int) -> list[Outcome]:
    if isinstance(answer, dict):
      values = answer.get("ok")
      if isinstance(values, list) and len(values) == count:
        return [Value(x) if isinstance(x, float) else Failed(str(x)) for x in values]
      answer = Failed(answer.get("error", "its process sent an unexpected answer"))
    self._children.discard(worker)
    return [answer] * count

  def _arguments(self, call: Call) -> tuple[int, int, bytes]:
    try:
      columns = pickle.dumps(dict(call.arguments))
    except Exception as error:  # user objects may raise any exception here
      raise TypeError(
        f"the columns of {self._names[call.function]} cannot be sent to another "
        f"process: {describe(error)}; use text and numbers, or workers=0"
      ) from error
    return call.function, call.count, columns


def _outcomes(
  functions: Sequence[Callable[..., Any]], index: int, count: int, columns: bytes
) -> list[float | str]:
  """Calls a function in a worker; returns values as numbers and failures as text."""
  try:
    arguments = pickle.loads(columns)
  except Exception as error:  # user classes may raise any exception here
    return [f"the columns cannot be loaded in a worker: {describe(error)}"] * count
  outcomes = reward_outcomes.call(functions[index], arguments, count)
  return [x.value if isinstance(x, Value) else x.error for x in outcomes]
