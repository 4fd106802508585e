"""A conversation in which the policy calls tools until it answers without a call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tunix.rl.env import calls
from tunix.rl.env.env import Action, Message, StepResult
from tunix.rl.env.tools import tool as tools_lib

# (messages of the whole conversation) -> reward, plain or async
ConversationReward = Callable[[list[Message]], Any]


class ToolEnv:
  """An environment of tools. An answer without a call of a tool ends the episode.

  A call that cannot be read, a wrong argument and an exception of a tool are answers to
  the policy, which may try again.

  Args:
    prompt: text of the user, or messages.
    tools: functions, `Tool`s, or objects whose public methods are tools.
    reward: gets the messages when the episode ends, by an answer or by a limit, and
      returns the reward; None: 0, for rewards by reward functions.

  Attributes:
    tool_schemas: JSON schemas of the tools, which the chat template shows.
    messages: the conversation so far.
  """

  def __init__(
    self,
    prompt: str | Sequence[Message],
    tools: Iterable[Any],
    reward: ConversationReward | None = None,
  ):
    self._tools = tools_lib.as_tools(tools)
    self.tool_schemas = [tool.schema for tool in self._tools.values()]
    self._reward = reward
    is_text = isinstance(prompt, str)
    self.messages: list[Message] = (
      [{"role": "user", "content": prompt}] if is_text else [dict(m) for m in prompt]
    )

  def initial_observation(self) -> list[Message]:
    """Returns the messages of the prompt."""
    return list(self.messages)

  async def step(self, action: Action) -> StepResult:
    """Runs the calls of an answer at the same time; without a call it is the last."""
    self.messages.append(action.message)
    wanted = action.message.get("tool_calls", ())
    if not wanted and action.problem is None:
      return StepResult(reward=await self.final_reward(), episode_done=True)
    answers = await asyncio.gather(*map(self._answer, wanted))
    failed = sum(result.finish != "ok" for _, result in answers)
    new = [message for message, _ in answers]
    if action.problem is not None:
      new.append({"role": "user", "content": f"Error: {action.problem}."})
    self.messages += new
    return StepResult(
      reward=0.0,
      episode_done=False,
      next_observation=new,
      metrics={"tool_calls": len(wanted), "tool_failures": failed},
    )

  async def _answer(self, call: dict[str, Any]) -> tuple[Message, Any]:
    function = call["function"]
    result = await tools_lib.call_async(
      self._tools, function["name"], function["arguments"]
    )
    message = {
      "role": "tool",
      "name": function["name"],
      "tool_call_id": call["id"],
      "content": result.text,
    }
    return message, result

  async def final_reward(self) -> float:
    """Returns the reward of the conversation, also if a limit has ended it."""
    reward = self._reward
    if reward is None:
      return 0.0
    return await calls.in_thread(lambda: reward(self.messages))
