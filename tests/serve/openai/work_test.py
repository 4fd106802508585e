"""Long texts: refused by their size, and read apart from other requests."""

import asyncio
import threading

import pytest

from tests.serve.serving import error_of, server
from tunix.generate.sizes import text_size
from tunix.serve.openai.work import Readers

LONG = "a" * (256 * text_size.TOKEN_CHARACTERS + 1)  # for the context of 256 tokens
USER = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {LONG: {}}}}
TOO_LONG = {
  "text": ("/v1/completions", {"prompt": LONG}, "prompt"),
  "one of two texts": ("/v1/completions", {"prompt": ["a", LONG]}, "prompt"),
  "message": (
    "/v1/chat/completions",
    {"messages": [USER, {**USER, "content": LONG}]},
    "messages",
  ),
  "tool": ("/v1/chat/completions", {"messages": [USER], "tools": [TOOL]}, "messages"),
  "documents": (
    "/v1/chat/completions",
    {"messages": [USER], "documents": [{"text": LONG}]},
    "messages",
  ),
  "tokenize": ("/tokenize", {"prompt": LONG}, "prompt"),
  "tokenize a chat": (
    "/tokenize",
    {"messages": [{**USER, "content": LONG}]},
    "messages",
  ),
  "detokenize": ("/detokenize", {"tokens": [1] * 257}, "tokens"),
}


@pytest.mark.parametrize("name", TOO_LONG)
def test_what_cannot_fit_is_refused_before_a_tokenizer_sees_it(name, monkeypatch):
  path, body, param = TOO_LONG[name]
  with server() as made:
    for method in ("encode", "decode", "apply_chat_template"):
      monkeypatch.setattr(made.engine.tokenizer, method, None)
    error = error_of(made.post(path, body), 400)
  assert error["param"] == param


def test_what_a_template_repeats_is_measured_too(monkeypatch):
  with server() as made:
    tokenizer = made.engine.tokenizer
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda *_, **__: LONG)
    monkeypatch.setattr(tokenizer, "encode", None)
    error = error_of(made.post("/v1/chat/completions", {"messages": [USER]}), 400)
  assert error["code"] == "context_length_exceeded"


def test_a_smaller_limit_of_prompts_bounds_their_texts():
  text = LONG[: len(LONG) // 2]
  for most, status in ((None, 200), (8, 400)):
    with server(max_prompt_tokens=most) as made:
      assert made.post("/tokenize", {"prompt": text}).status_code == status


def test_long_requests_wait_for_each_other_and_are_dropped_with_their_clients():
  ran, begun, end = [], threading.Event(), threading.Event()

  def block():
    begun.set()
    assert end.wait(20)

  async def run():
    readers, size = Readers(most_long=1), 2**20
    first = asyncio.ensure_future(readers.run(size, block))
    await asyncio.to_thread(begun.wait, 20)
    second = asyncio.ensure_future(readers.run(size, ran.append, "second"))
    third = asyncio.ensure_future(readers.run(size, ran.append, "third"))
    await readers.run(10, ran.append, "short")  # while a long request is read
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    end.set()
    await asyncio.gather(first, third)

  asyncio.run(run())
  assert ran == ["short", "third"]


def test_a_client_that_goes_away_gives_up_its_place_among_long_requests(monkeypatch):
  """A request waits in `Readers`, and its client disconnects."""
  with server() as made:
    readers, seen = made.context.readers, []

    async def run():
      async with made.client() as client:
        started, end = threading.Event(), threading.Event()
        blockers = [
          asyncio.ensure_future(
            readers.run(2**20, lambda: started.set() or end.wait(20))
          )
          for _ in range(readers.most_long)
        ]
        await asyncio.to_thread(started.wait, 20)
        monkeypatch.setattr(
          made.engine.tokenizer, "encode", lambda *_, **__: seen.append("encoded")
        )
        body = {"prompt": LONG[:-1]}
        call = asyncio.ensure_future(client.post("/v1/completions", json=body))
        while not (made.context.gate.running or call.done()):
          await asyncio.sleep(0.002)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        end.set()
        await asyncio.gather(*blockers)
        await readers.run(2**20, seen.append, "next")

    asyncio.run(run())
  assert seen == ["next"]
