"""A real socket, unmodified clients, signals."""

import asyncio
import contextlib
import http.client
import json
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from tests.serve.fake_engine import FakeDriver, FakeEngine
from tunix.serve import server as server_lib
from tunix.serve.app import make_app
from tunix.serve.settings import ServeSettings

ROOT = pathlib.Path(__file__).parents[2]
MESSAGES = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
TEXT = (
  '<think>so</think>I add.\n<tool_call>{"name": "add", "arguments": {}}</tool_call>'
)


@contextlib.contextmanager
def listening(engine, **settings):
  """Yields an address, the driver and the server."""
  driver = FakeDriver(engine).start()
  chosen = ServeSettings(port=0, **settings)
  addresses, started = [], threading.Event()

  def on_start(address):
    addresses.append(address)
    started.set()

  server = server_lib.make_server(make_app(driver, chosen), chosen, on_start)
  thread = threading.Thread(target=server.run, daemon=True)
  thread.start()
  assert started.wait(20)
  try:
    yield addresses[0], driver, server
  finally:
    server.should_exit = True
    thread.join(20)
    driver.stop(timeout=10)
  assert not thread.is_alive()


def test_the_openai_client_sync_and_async():
  openai = pytest.importorskip("openai")
  with listening(FakeEngine(text=TEXT), api_key="secret") as (address, _, _):
    options = {"base_url": f"{address}/v1", "api_key": "secret", "max_retries": 0}
    with openai.OpenAI(**options) as client:
      assert [model.id for model in client.models.list()] == ["default"]
      body = {"model": "default", "messages": MESSAGES, "tools": TOOLS}
      answer = client.chat.completions.create(**body, logprobs=True)
      choice = answer.choices[0]
      assert choice.message.content == "I add."
      assert choice.message.tool_calls[0].function.name == "add"
      assert choice.finish_reason == "tool_calls"
      assert len(choice.logprobs.content) == answer.usage.completion_tokens

      stream = client.chat.completions.create(
        **body, stream=True, stream_options={"include_usage": True}
      )
      chunks = list(stream)
      text = "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
      assert text == "I add." and chunks[-1].usage == answer.usage
      # The client's own accumulator takes the events of a stream.
      with client.chat.completions.stream(**body) as events:
        final = events.get_final_completion()
      assert final.choices[0].message.tool_calls[0].function.name == "add"

      plain = client.completions.create(model="default", prompt="a", echo=True)
      assert plain.choices[0].text.startswith("a")
      with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="default", prompt="a", n=0)
      assert refused.value.param == "n"
      with pytest.raises(openai.NotFoundError):
        client.completions.create(model="x", prompt="a")
    wrong = openai.OpenAI(**{**options, "api_key": "wrong"})
    with pytest.raises(openai.AuthenticationError):
      wrong.models.list()

    async def run():
      async with openai.AsyncOpenAI(**options) as client:
        whole = client.chat.completions.create(**body)
        stream = await client.chat.completions.create(**body, stream=True)
        parts = [c.choices[0].delta.content or "" async for c in stream]
        return (await whole).choices[0].message.content, "".join(parts)

    assert asyncio.run(run()) == ("I add.", "I add.")


def test_closed_connections_free_the_engine():
  engine = FakeEngine(rounds=1)
  with listening(engine) as (address, _, _):
    host = address.removeprefix("http://")
    for stream in (True, False):
      engine.hold_at = 5 if stream else 0
      connection = http.client.HTTPConnection(host, timeout=20)
      body = {"prompt": [60], "max_tokens": 200, "stream": stream}
      headers = {"Content-Type": "application/json"}
      connection.request("POST", "/v1/completions", json.dumps(body), headers)
      _until(lambda: engine.rows)
      if stream:
        connection.getresponse().read(10)
      connection.sock.shutdown(socket.SHUT_RDWR)
      connection.close()
      _until(lambda: not engine.rows)
      assert len(engine.cancelled) == 1
      engine.cancelled.clear()


def test_a_drain_finishes_what_runs_and_refuses_the_rest():
  engine = FakeEngine()
  body = {"prompt": [60], "max_tokens": 8}
  with listening(engine, max_concurrent=1, drain_timeout=20.0) as parts:
    address, driver, server = parts
    driver.pause("keep")
    answers = {}

    def post(name):
      with contextlib.suppress(httpx.TransportError):
        answers[name] = httpx.post(f"{address}/v1/completions", json=body, timeout=20)

    threads = [
      threading.Thread(target=post, args=(name,)) for name in ("runs", "waits")
    ]
    threads[0].start()
    _until(lambda: engine.rows)
    gate = server.config.app.state.context.gate
    threads[1].start()
    _until(lambda: gate.waiting)
    server.should_exit = True
    threads[1].join(20)
    assert answers["waits"].status_code == 503
    assert answers["waits"].json()["error"]["code"] == "shutting_down"
    driver.resume()
    threads[0].join(20)
    assert answers["runs"].status_code == 200
    with pytest.raises(httpx.TransportError):
      httpx.get(f"{address}/health", timeout=5)


def test_a_drain_is_bounded():
  engine = FakeEngine()
  with listening(engine, drain_timeout=0.2) as (address, driver, server):
    driver.pause("keep")
    answers = []
    body = {"prompt": [60], "max_tokens": 8}
    post = lambda: answers.append(
      httpx.post(f"{address}/v1/completions", json=body, timeout=20)
    )
    thread = threading.Thread(target=post)
    thread.start()
    _until(lambda: engine.rows)
    server.should_exit = True
    thread.join(20)
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["code"] == "shutting_down"
    assert len(engine.cancelled) == 1


PROGRAM = """
import sys
from tests.serve.fake_engine import FakeDriver, FakeEngine
from tunix.serve.server import serve
from tunix.serve.settings import ServeSettings
engine = FakeEngine(rounds=1)
engine.hold_at = int(sys.argv[2]) if len(sys.argv) > 2 else None
driver = FakeDriver(engine)
settings = ServeSettings(port=int(sys.argv[1]))
serve(driver, settings, on_start=lambda a: print(a, flush=True))
print("stopped" if not driver.alive else "alive", flush=True)
"""
STREAM = {"prompt": [60], "max_tokens": 250, "stream": True}


@contextlib.contextmanager
def program(*arguments):
  """Yields a process that serves, and its address."""
  process = subprocess.Popen(
    [sys.executable, "-c", PROGRAM, *map(str, arguments)],
    stdout=subprocess.PIPE,
    text=True,
    cwd=ROOT,
  )
  try:
    yield process, process.stdout.readline().strip()
  finally:
    process.kill()
    process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_after_the_running_requests(number):
  with program(0) as (process, address):
    url = f"{address}/v1/completions"
    with httpx.stream("POST", url, json=STREAM, timeout=20) as answer:
      lines = answer.iter_lines()
      next(lines)
      process.send_signal(number)
      rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert process.stdout.readline().strip() == "stopped"
    assert process.wait(20) == 0


def test_a_killed_server_ends_its_streams_and_starts_again():
  with program(0, 5) as (process, address):
    url = f"{address}/v1/completions"
    with httpx.stream("POST", url, json=STREAM, timeout=20) as answer:
      lines = answer.iter_lines()
      next(lines)
      process.kill()
      with pytest.raises(httpx.TransportError):
        list(lines)
  port = int(address.rpartition(":")[2])
  with program(port) as (_, again):
    assert again == address
    assert httpx.get(f"{address}/ready").status_code == 200
    chosen = ServeSettings(port=port)
    app = make_app(FakeDriver(FakeEngine()), chosen)
    with pytest.raises(OSError, match=f"port {port}"):
      server_lib.make_server(app, chosen)


def _until(condition):
  for _ in range(4000):
    if condition():
      return
    time.sleep(0.002)
  raise AssertionError("the condition did not come true")
