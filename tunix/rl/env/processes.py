"""Environments in processes of their own, which are killed if they do not answer.

An environment that hangs, uses all memory, forks or ends its process then costs only
its episode. This isolates faults. It is not a sandbox against malicious code: an
environment may do what the user may do (see docs/guides/tools.md for a jail).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tunix.rl.env import env as env_lib
from tunix.rl.env.env import Action, EnvError, StepResult
from tunix.rl.reward.outcomes import name_of
from tunix.sandbox.child import Child, ChildError, Children

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
      self._children = Children(
        _Host(make), timeout_s=timeout_s, memory_bytes=memory_bytes
      )
    except TypeError as error:
      raise TypeError(
        f"env {name_of(make)} cannot be sent to a process: {error}. Define it at the "
        'top level of a module, or set isolation="thread"'
      ) from error
    self._lock, self._idle = threading.Lock(), list[Child]()

  def environment(self, **arguments: object) -> ProcessEnv:
    """Makes an environment in a process.

    Raises:
      EnvError: the function failed, or did not answer in time.
    """
    child = self._idle_child()
    try:
      made = self.call(child, "make", arguments)
    except EnvError:
      self.give_back(child)
      raise
    kind = FinalProcessEnv if made["has_final_reward"] else ProcessEnv
    return kind(self, child, made["tool_schemas"])

  def call(self, child: Child, method: str, argument: object) -> Any:
    """Calls a method of `_Host` in a process, and waits for its result.

    Raises:
      EnvError: it raised, or the process ended or did not answer; it is then killed.
    """
    try:
      child.send(method, argument)
    except ChildError as error:
      raise EnvError(str(error)) from error
    return self._result(child)

  def give_back(self, child: Child) -> None:
    """Keeps a process for another environment, unless it has ended."""
    with self._lock:
      if child in self._children.running:
        self._idle.append(child)

  def close(self) -> None:
    """Ends the processes."""
    with self._lock:
      self._idle.clear()
      self._children.close()

  def _idle_child(self) -> Child:
    """Returns a process that has loaded the function."""
    with self._lock:
      while self._idle:
        child = self._idle.pop()
        if not child.exited():
          return child
        self._children.discard(child)
    child = self._children.start()
    try:
      self._result(child)
    except EnvError:
      self._children.discard(child)
      raise
    return child

  def _result(self, child: Child) -> Any:
    try:
      answer = child.wait(_MAX_ANSWER)
    except (ChildError, TimeoutError) as error:
      self._children.discard(child)
      raise EnvError(str(error)) from error
    if "error" in answer:
      raise EnvError(str(answer["error"]))
    return answer["ok"]


class ProcessEnv:
  """An `Env` whose environment is in another process.

  Attributes:
    tool_schemas: those of the environment.
  """

  def __init__(self, processes: EnvProcesses, child: Child, tool_schemas: list[Any]):
    self._processes, self._child = processes, child
    self.tool_schemas = tool_schemas

  def initial_observation(self) -> tuple[Any, Any]:
    observation, stop, self.tool_schemas = self._call("first", None)
    return observation, stop

  def step(self, action: Action) -> StepResult:
    fields = {
      "ids": list(action),
      "text": action.text,
      "message": action.message,
      "problem": action.problem,
      "finish_reason": action.finish_reason,
    }
    return StepResult(**self._call("step", fields))

  def close(self) -> None:
    """Ends the episode: the process may serve another one."""
    self._processes.give_back(self._child)

  def _call(self, method: str, argument: object) -> Any:
    return self._processes.call(self._child, method, argument)


class FinalProcessEnv(ProcessEnv):
  """A `ProcessEnv` whose environment has a last reward."""

  def final_reward(self) -> float:
    return self._call("final", None)


class _Host:
  """Calls methods of an environment, in its process.

  The method `make` makes a new environment, so that a process serves one episode after
  another.
  """

  def __init__(self, make: Callable[..., Any]):
    self._make = make
    self._env: Any = None

  def __call__(self, method: str, argument: object) -> Any:
    return getattr(self, method)(argument)

  @functools.cached_property
  def _loop(self) -> asyncio.AbstractEventLoop:
    """The loop that the coroutines of environments run in."""
    return asyncio.new_event_loop()

  def make(self, arguments: dict[str, Any]) -> Any:
    """Makes an environment; returns its tools, and whether it has a last reward."""
    self._env = self._make(**arguments)
    if hasattr(self._env, "make_envs"):
      raise EnvError(
        "env made a group of environments, which cannot be in processes of their own: "
        'make one environment at a time, or set isolation="thread"'
      )
    return {
      "tool_schemas": self._tools(),
      "has_final_reward": hasattr(self._env, "final_reward"),
    }

  def first(self, argument: None) -> Any:
    """Returns the first observation, its stop condition, and the tools."""
    del argument
    result = self._awaited(self._env.initial_observation())
    pair = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    return [_plain(pair[0]), pair[1], self._tools()]

  def _tools(self) -> list[dict[str, Any]]:
    return [dict(x) for x in getattr(self._env, "tool_schemas", None) or ()]

  def final(self, argument: None) -> float:
    """Returns the last reward."""
    del argument
    return env_lib.finite(self._awaited(self._env.final_reward()))

  def step(self, fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a `StepResult`."""
    action = Action(fields.pop("ids"), **fields)
    result = env_lib.step_result(self._awaited(env_lib.take(self._env, action)))
    observation = None if result.episode_done else _plain(result.next_observation)
    return {
      "reward": result.reward,
      "episode_done": result.episode_done,
      "next_observation": observation,
      "next_stop_condition": result.next_stop_condition,
      "metrics": dict(result.metrics),
      "logs": {str(k): str(v) for k, v in result.logs.items()},
    }

  def _awaited(self, value: object) -> Any:
    return self._loop.run_until_complete(value) if inspect.isawaitable(value) else value


def _plain(observation: object) -> Any:
  if isinstance(observation, str):
    return observation
  ids = env_lib.ids_of(observation)
  if ids is not None:
    return ids
  messages = env_lib.messages_of(observation)
  for source in filter(None, map(_source, _parts(messages))):
    if not isinstance(source, str):
      raise env_lib.EnvError(
        f"an observation has an image of the type {type(source).__name__}; with "
        "isolation='process' give its path, or a data URI, as a string"
      )
  return messages


def _parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
  for message in messages:
    content = message.get("content")
    if isinstance(content, list | tuple):
      yield from (part for part in content if isinstance(part, Mapping))


def _source(part: Mapping[str, Any]) -> Any:
  return part.get("image") if part.get("type") == "image" else None
