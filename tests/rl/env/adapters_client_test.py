"""Environments that are programs around a client of OpenAI."""

import importlib.util
import json

import pytest

from tests import toys_calls
from tests.rl.env import fakes
from tunix.rl.env.adapters.openai_client import ClientEnvironment

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec("openai") is None, reason="pip install openai"
)

ADD = {
  "type": "function",
  "function": {
    "name": "add",
    "description": "Adds.",
    "parameters": {
      "type": "object",
      "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    },
  },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'


class Answers(fakes.FixedPolicy):
  """Draws given texts, one a turn."""

  def __init__(self, tokenizer, *texts):
    super().__init__()
    end = tokenizer.eos_ids()[0]
    self._texts = [[*tokenizer.encode(text), end] for text in texts]

  def poll(self):
    ready, self._waiting = self._waiting, []
    out = []
    for draw in ready:
      ids = self._texts[draw.turn]
      out.append(fakes.drawn(draw.episode, ids))
    return out


def run(program, *texts, **limits):
  tokenizer = toys_calls.tokenizer_of("qwen25")
  policy = Answers(tokenizer, *texts)
  options = {"tokenizer": tokenizer, "policy": policy, "prompt": 400, **limits}
  (episode,) = fakes.run(lambda: ClientEnvironment(program), **options)
  return episode


async def adds(client):
  """Asks, runs the tool of the answer, and rewards the last answer."""
  messages = [{"role": "user", "content": "what is 3 + 4 ?"}]
  while True:
    got = await client.chat.completions.create(
      model="policy", messages=messages, tools=[ADD]
    )
    message = got.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
      return float("seven" in message.content), {"turns": len(messages)}
    (call,) = message.tool_calls
    total = sum(json.loads(call.function.arguments).values())
    messages.append({"role": "tool", "content": str(total), "tool_call_id": call.id})


def test_a_program_with_a_tool():
  episode = run(adds, CALL, "it is seven")
  assert episode.failure is None and episode.finish_reason == "done"
  assert [turn.reward for turn in episode.turns] == [0.0, 1.0]
  assert episode.turns[-1].metrics == {"turns": 4}
  assert [m["role"] for m in episode.messages] == ["user", "assistant", "tool"] + [
    "assistant"
  ]
  assert episode.messages[2]["content"] == "7"
  assert len(episode.rows()) == 1


def test_a_limit_tells_the_program_that_there_is_no_room():
  async def asks(client):
    messages = [{"role": "user", "content": "so ?"}]
    for count in range(9):
      try:
        got = await client.chat.completions.create(model="policy", messages=messages)
      except Exception as error:
        assert "maximum context length" in str(error)
        return 0.25 * count
      messages += [got.choices[0].message.model_dump(exclude_none=True)]
      messages += [{"role": "user", "content": "and ?"}]

  episode = run(asks, "we ask", "again", max_turns=2)
  assert episode.finish_reason == "turns" and episode.reward == 0.5


@pytest.mark.parametrize("how", ["raises", "silent", "changes"])
def test_a_program_that_fails(how):
  async def program(client):
    if how == "silent":
      return 1.0
    ask = client.chat.completions.create
    await ask(model="policy", messages=[{"role": "user", "content": "so ?"}])
    if how == "raises":
      raise RuntimeError("the database is away")
    await ask(model="policy", messages=[{"role": "user", "content": "other"}])

  episode = run(program, "we ask")
  assert episode.finish_reason == "failed"
  said = {"raises": "the database is away", "silent": "without a request"}
  assert said.get(how, "changes earlier messages") in episode.failure
