"""The process of one environment, for `processes`.

It receives the function that makes environments, and then messages [method, argument].
The method "make" makes a new environment, so that a process serves one episode after
another. Answers are JSON: {"ok": result}, or {"error": text}.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import signal
import socket
from typing import Any

from tunix.rl.env import env as env_lib
from tunix.rl.env.env import Action, EnvError
from tunix.rl.reward import worker as reward_worker
from tunix.rl.reward.outcomes import describe


def main(descriptor: int) -> None:
  """Serves the socket with the given file descriptor until it is closed."""
  os.environ["JAX_PLATFORMS"] = "cpu"  # the trainer holds the accelerators
  os.set_inheritable(descriptor, False)
  connection = socket.socket(fileno=descriptor)
  hello = pickle.loads(reward_worker.receive(connection))
  host = None
  try:
    host = _Host(reward_worker.load(hello))
    reward_worker.limit_memory(hello["memory_bytes"])
    hello_answer: dict[str, Any] = {"ok": None}
  # The user's modules may raise anything; the trainer receives it as text.
  except (Exception, SystemExit) as error:
    hello_answer = {"error": describe(error)}
  reward_worker.send(connection, hello_answer)
  while True:
    method, argument = pickle.loads(reward_worker.receive(connection))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    seconds = hello["timeout_s"] + reward_worker.GRACE_S
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
      answer = reward_worker.packed({"ok": getattr(host, method)(argument)})
    # Likewise, of the environment, whose values may be no JSON.
    except (Exception, SystemExit) as error:
      answer = reward_worker.packed({"error": describe(error)})
    signal.setitimer(signal.ITIMER_REAL, 0)
    connection.sendall(answer)


class _Host:
  """The environment, and the loop that its coroutines run in."""

  def __init__(self, make: Any):
    self._make = make
    self._env: Any = None
    self._loop = asyncio.new_event_loop()

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

  def _awaited(self, value: Any) -> Any:
    return self._loop.run_until_complete(value) if inspect.isawaitable(value) else value


def _plain(observation: Any) -> Any:
  if isinstance(observation, str):
    return observation
  ids = env_lib.ids_of(observation)
  return env_lib.messages_of(observation) if ids is None else ids
