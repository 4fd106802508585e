"""Environments of OpenEnv, whose client talks to an environment's server."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tunix.rl.env.env import Action, StepResult


class OpenEnvEnvironment:
  """A client of OpenEnv as an `Env`.

  Args:
    client: an `openenv.core.EnvClient`: `reset()` and `step(action)` return an object
      with `observation`, `reward` and `done`.
    to_action: turns the text of an answer into an action of the client.
    to_text: turns an observation of the client into a text, or into messages.
    **options: arguments of `reset`.
  """

  def __init__(
    self,
    client: Any,
    to_action: Callable[[str], Any],
    to_text: Callable[[Any], Any] = str,
    **options: object,
  ):
    self._client, self._to_action, self._to_text = client, to_action, to_text
    self._options = options

  async def initial_observation(self) -> Any:
    """Resets the environment."""
    result = await _awaited(self._client.reset(**self._options))
    return self._to_text(result.observation)

  async def step(self, action: Action) -> StepResult:
    """Sends an answer. A reward of None counts as 0, as in OpenEnv."""
    result = await _awaited(self._client.step(self._to_action(action.text)))
    return StepResult(
      reward=float(result.reward or 0.0),
      episode_done=bool(result.done),
      next_observation=self._to_text(result.observation),
    )

  async def close(self) -> None:
    """Closes the connection."""
    await _awaited(self._client.close())


async def _awaited(value: object) -> Any:
  return await value if inspect.isawaitable(value) else value
