"""Environments in processes of their own, which are killed if they do not answer.

An environment that hangs, uses all memory, forks or ends its process then costs only
its episode. This isolates faults. It is not a sandbox against malicious code: an
environment may do what the user may do (see docs/guides/tools.md for a jail).
"""

from __future__ import annotations

import json
import pickle
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from tunix.rl.env.env import Action, EnvError, StepResult
from tunix.rl.reward import pool as reward_pool, worker as reward_worker
from tunix.rl.reward.outcomes import describe, name_of
from tunix.utils import processes

_MAX_ANSWER = 64 << 20  # bytes


class EnvProcesses:
  """Processes that host environments made by one function.

  Args:
    make: picklable function, such as a function or a class of a module.
    timeout_s: most seconds of a call.
    memory_bytes: address space that a process may use in addition to what it uses after
      loading the function; None: no limit. Linux only.

  Raises:
    TypeError: the function cannot be sent to a process.
  """

  def __init__(
    self,
    make: Callable[..., Any],
    *,
    timeout_s: float,
    memory_bytes: int | None = None,
  ):
    try:
      payload = pickle.dumps(make)
    except Exception as error:  # the user's objects may raise anything here
      raise TypeError(
        f"env {name_of(make)} cannot be sent to a process: {describe(error)}. Define "
        'it at the top level of a module, or set isolation="thread"'
      ) from error
    self._hello = pickle.dumps(
      {
        "main": reward_pool.main_of(payload),
        "functions": payload,
        "timeout_s": timeout_s,
        "memory_bytes": memory_bytes,
      }
    )
    self._timeout_s = timeout_s
    self._lock, self._idle = threading.Lock(), list[_Process]()
    self._all: list[_Process] = []
    self._close = weakref.finalize(self, _kill_all, self._all)

  def environment(self, **arguments: Any) -> ProcessEnv:
    """Makes an environment in a process.

    Raises:
      EnvError: the function failed, or did not answer in time.
    """
    with self._lock:
      process = self._idle.pop() if self._idle else None
    if process is None:
      process = _Process(self._hello, self._timeout_s)
      with self._lock:
        self._all.append(process)
    try:
      if not process.is_ready:
        process.wait_until_ready()
      made = process.call("make", arguments)
    except EnvError:
      if not process.is_ready:  # it has no function to call
        process.kill()
      self._give_back(process)
      raise
    kind = FinalProcessEnv if made["has_final_reward"] else ProcessEnv
    return kind(process, made["tool_schemas"], self._give_back)

  def close(self) -> None:
    """Ends the processes."""
    with self._lock:
      self._idle.clear()
      _kill_all(self._all)

  def _give_back(self, process: _Process) -> None:
    with self._lock:
      if process.is_alive:
        self._idle.append(process)
      elif process in self._all:
        self._all.remove(process)


class ProcessEnv:
  """An `Env` whose environment is in another process.

  Attributes:
    tool_schemas: those of the environment.
  """

  def __init__(
    self,
    process: _Process,
    tool_schemas: list[Any],
    give_back: Callable[[_Process], None],
  ):
    self._process, self._give_back = process, give_back
    self.tool_schemas = tool_schemas

  def initial_observation(self) -> tuple[Any, Any]:
    observation, stop, self.tool_schemas = self._process.call("first", None)
    return observation, stop

  def step(self, action: Action) -> StepResult:
    fields = {
      "ids": list(action),
      "text": action.text,
      "message": action.message,
      "problem": action.problem,
      "finish_reason": action.finish_reason,
    }
    return StepResult(**self._process.call("step", fields))

  def close(self) -> None:
    """Ends the episode: the process may serve another one."""
    self._give_back(self._process)


class FinalProcessEnv(ProcessEnv):
  """A `ProcessEnv` whose environment has a last reward."""

  def final_reward(self) -> float:
    return self._process.call("final", None)


class _Process:
  """A process and our end of its socket; calls block the calling thread."""

  def __init__(self, hello: bytes, timeout_s: float):
    self._timeout_s, self.is_alive, self.is_ready = timeout_s, True, False
    ours, theirs = socket.socketpair()
    with theirs:
      code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from tunix.rl.env import env_worker; env_worker.main({theirs.fileno()})"
      )
      self._process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,  # a process group, which is killed as a whole
      )
    self._socket, self._hello = ours, hello

  def wait_until_ready(self) -> None:
    """Sends the function; waits until the process has loaded it."""
    self._exchange(self._hello, reward_pool.START_TIMEOUT_S)
    self.is_ready = True

  def call(self, method: str, argument: Any) -> Any:
    """Calls a method in the process.

    Raises:
      EnvError: it raised, or the process ended or did not answer; it is then killed.
    """
    if not self.is_alive:
      raise EnvError("its process has ended")
    return self._exchange(pickle.dumps((method, argument)), self._timeout_s)

  def kill(self) -> None:
    """Ends the process and its children."""
    self.is_alive = False
    self._socket.close()
    processes.kill_group(self._process)

  def _exchange(self, message: bytes, seconds: float) -> Any:
    try:
      answer = self._answer(message, seconds)
    except TimeoutError as error:
      self.kill()
      raise EnvError(f"no answer within {seconds:g} s") from error
    except (OSError, ValueError, RecursionError) as error:
      self.kill()
      raise EnvError(f"its process: {describe(error)}") from error
    if "error" in answer:
      raise EnvError(str(answer["error"]))
    return answer.get("ok")

  def _answer(self, message: bytes, seconds: float) -> dict[str, Any]:
    """Sends a message and returns its answer.

    Raises:
      OSError, ValueError, RecursionError: the process ended, or the answer is no JSON
        object or too long.
    """
    deadline, header = time.monotonic() + seconds, reward_worker.HEADER
    self._socket.settimeout(seconds)
    self._socket.sendall(header.pack(len(message)) + message)
    (length,) = header.unpack(self._read(header.size, deadline))
    if length > _MAX_ANSWER:
      raise ValueError(f"an answer of {length} bytes; expected at most {_MAX_ANSWER}")
    answer = json.loads(self._read(length, deadline))
    if not isinstance(answer, dict):
      raise ValueError("an answer that is no JSON object")
    return answer

  def _read(self, count: int, deadline: float) -> bytes:
    parts = bytearray()
    while len(parts) < count:
      left = deadline - time.monotonic()
      if left <= 0:
        raise TimeoutError
      self._socket.settimeout(left)
      part = self._socket.recv(min(count - len(parts), 1 << 20))
      if not part:
        raise ConnectionError("ended without an answer")
      parts += part
    return bytes(parts)


def _kill_all(running: list[_Process]) -> None:
  while running:
    running.pop().kill()
