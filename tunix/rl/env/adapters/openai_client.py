"""Environments that are programs around a client of OpenAI.

    async def program(client):
      answer = await client.chat.completions.create(model="policy", messages=[...])
      ...
      return reward

The requests of the client reach no network: each one waits until the policy has drawn
an answer. A conversation may only grow, so that what is trained is what was drawn.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from tunix.rl.env.env import Action, EnvError, Message, StepResult
from tunix.utils.optional import require

_PACKAGE = "an environment around a client of OpenAI", "openai"
# The words by which libraries know that there is no room for another answer.
_NO_ROOM = (
  "This model's maximum context length is reached: the episode has no room for another "
  "answer"
)


class ClientEnvironment:
  """A program that calls chat completions, as an `Env`.

  Args:
    program: `async` function that gets an `openai.AsyncOpenAI` and returns the reward,
      or (reward, metrics). Its requests must come one after another.

  Attributes:
    tool_schemas: tools of the first request.
  """

  def __init__(self, program: Callable[[Any], Any]):
    self._program = program
    self.tool_schemas: list[Any] = []
    self._messages: list[Message] = []  # that the policy has read or written
    self._requests: asyncio.Queue[dict[str, Any] | None] | None = None
    self._answer: asyncio.Future[Any] | None = None
    self._task: asyncio.Task[Any] | None = None

  async def initial_observation(self) -> list[Message]:
    """Starts the program; returns the messages of its first request.

    Raises:
      EnvError: the program ended without a request.
    """
    self._requests = asyncio.Queue()
    self._task = asyncio.create_task(self._run(self._requests))
    if (request := await self._requests.get()) is None:
      await self._task  # raises what the program raised
      raise EnvError("the program ended without a request")
    self.tool_schemas += request.get("tools") or ()
    return self._new_of(request)

  async def step(self, action: Action) -> StepResult:
    """Answers the request; returns the next one, or the reward at the end."""
    assert self._requests is not None and self._task is not None
    self._messages.append(action.message)
    self._reply(_completion(action))
    request = await self._requests.get()
    if request is None:
      reward, metrics = await self._task
      return StepResult(reward=reward, episode_done=True, metrics=metrics)
    return StepResult(
      reward=0.0, episode_done=False, next_observation=self._new_of(request)
    )

  async def final_reward(self) -> float:
    """Answers that the context is full; returns the reward that the program gives."""
    assert self._task is not None
    error = {"message": _NO_ROOM, "code": "context_length_exceeded"}
    self._reply({"error": error}, status=400)
    return (await self._task)[0]

  async def close(self) -> None:
    """Ends the program."""
    if self._task is not None:
      self._task.cancel()

  async def _run(self, requests: asyncio.Queue[Any]) -> tuple[float, dict[str, Any]]:
    httpx, openai = (require(name, *_PACKAGE) for name in ("httpx", "openai"))

    async def handle(request: Any) -> Any:
      self._answer = asyncio.get_running_loop().create_future()
      requests.put_nowait(json.loads(request.content))
      status, body = await self._answer
      return httpx.Response(status, json=body)

    web = httpx.AsyncClient(transport=httpx.MockTransport(handle))
    try:
      async with openai.AsyncOpenAI(
        api_key="none", base_url="http://policy", http_client=web, max_retries=0
      ) as client:
        got = await self._program(client)
    finally:
      requests.put_nowait(None)
    reward, metrics = got if isinstance(got, tuple) else (got, {})
    return reward, dict(metrics)

  def _reply(self, body: object, status: int = 200) -> None:
    if self._answer is not None and not self._answer.done():
      self._answer.set_result((status, body))

  def _new_of(self, request: Mapping[str, Any]) -> list[Message]:
    """Returns the messages that the policy has not seen."""
    messages, known = request["messages"], self._messages
    if [_core(m) for m in messages[: len(known)]] != [_core(m) for m in known]:
      raise EnvError(
        "a request changes earlier messages; expected the conversation so far and new "
        "messages after it"
      )
    new = [_read(message) for message in messages[len(known) :]]
    if not new:
      raise EnvError("a request has no new message")
    self._messages += new
    return new


def _read(message: Mapping[str, Any]) -> Message:
  """Returns a message whose tool calls have objects as arguments, for templates."""
  out = {name: value for name, value in message.items() if value is not None}
  if out.get("tool_calls"):
    calls = []
    for call in out["tool_calls"]:
      function = dict(call["function"])
      if isinstance(function.get("arguments"), str):
        function["arguments"] = json.loads(function["arguments"])
      calls.append({**call, "function": function})
    out["tool_calls"] = calls
  return out


def _core(message: Mapping[str, Any]) -> tuple[Any, ...]:
  """Returns what two forms of the same message have in common."""
  calls = [call["function"]["name"] for call in message.get("tool_calls") or ()]
  return message.get("role"), message.get("content") or "", calls


def _completion(action: Action) -> dict[str, Any]:
  """Returns an answer in the form of OpenAI's chat completions."""
  message = dict(action.message)
  if message.get("tool_calls"):
    message["tool_calls"] = [
      {
        **call,
        "function": {
          "name": call["function"]["name"],
          "arguments": json.dumps(call["function"]["arguments"]),
        },
      }
      for call in message["tool_calls"]
    ]
  reason = "tool_calls" if message.get("tool_calls") else "stop"
  if action.finish_reason == "length":
    reason = "length"
  return {
    "id": "episode",
    "object": "chat.completion",
    "created": 0,
    "model": "policy",
    "choices": [{"index": 0, "message": message, "finish_reason": reason}],
    "usage": {
      "prompt_tokens": 0,
      "completion_tokens": len(action),
      "total_tokens": len(action),
    },
  }
