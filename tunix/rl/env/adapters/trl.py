"""Environments of TRL's `environment_factory`.

Such an environment has `reset(**columns) -> str | None`, whose text is appended to the
prompt. Its other public methods are tools. `get_reward()`, if there is one, gives the
reward at the end; else reward functions do, which may take `environments`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunix.data import image_parts
from tunix.rl.env import calls
from tunix.rl.env.env import Message
from tunix.rl.env.tool_env import ToolEnv


class TRLEnvironment(ToolEnv):
  """An environment of TRL as an `Env`.

  Args:
    environment: an object that the user's factory returned.
    prompt: the prompt of the data, text or messages.
    columns: the row of the data, for `reset`.

  Attributes:
    environment: the object, which reward functions receive.
  """

  def __init__(self, environment: Any, prompt: Any, columns: Mapping[str, Any]):
    super().__init__(prompt, [environment], self._reward_of)
    self.environment, self._columns = environment, dict(columns)

  async def initial_observation(self) -> list[Message]:  # pyright: ignore[reportIncompatibleMethodOverride]
    """Resets the environment; its text comes at the end of the last message."""
    prompt = list(self.messages)
    columns = {"prompt": prompt, **self._columns}
    added = await calls.in_thread(lambda: self.environment.reset(**columns))
    if added:
      last = self.messages[-1]
      content: Any = last["content"]
      if isinstance(content, list):
        content = image_parts.surrounded(content, "", str(added))
      else:
        content = f"{content}{added}"
      self.messages[-1] = {**last, "content": content}
    return list(self.messages)

  def _reward_of(self, messages: list[Message]) -> Any:
    del messages
    get = getattr(self.environment, "get_reward", None)
    return 0.0 if get is None else get()
