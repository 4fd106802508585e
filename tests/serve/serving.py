"""A server without a socket: an application over the fake engine, and its client."""

import asyncio
import contextlib
import json
from typing import Any

import httpx

from tests.serve.fake_engine import FakeDriver, FakeEngine
from tunix.serve.app import make_app
from tunix.serve.settings import ServeSettings


class Server:
  """Calls the routes of an application in an event loop of its own."""

  def __init__(self, engine: FakeEngine, settings: ServeSettings, **parts: Any):
    self.engine, self.driver = engine, FakeDriver(engine).start()
    self.app = make_app(self.driver, settings, **parts)
    self.context = self.app.state.context

  def client(self, **options: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(self.app)
    return httpx.AsyncClient(
      transport=transport, base_url="http://127.0.0.1:8000", timeout=20, **options
    )

  def call(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
    async def run() -> httpx.Response:
      async with self.client() as client:
        return await client.request(method, path, json=body, **options)

    return asyncio.run(run())

  def post(self, path: str, body: Any = None, **options: Any) -> Any:
    return self.call("POST", path, body, **options)

  def get(self, path: str, **options: Any) -> Any:
    return self.call("GET", path, **options)

  def events(self, path: str, body: Any) -> list[Any]:
    """Returns the events of a stream; the last one must be [DONE]."""
    answer = self.post(path, {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    return parse_events(answer.text)


def parse_events(text: str) -> list[Any]:
  lines = [line for line in text.split("\n\n") if line]
  assert all(line.startswith("data: ") for line in lines)
  assert lines[-1] == "data: [DONE]"
  return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@contextlib.contextmanager
def server(engine: FakeEngine | None = None, *, parts: Any = None, **settings: Any):
  """A server with a started driver; the driver is stopped at the end."""
  chosen = ServeSettings(**settings)
  made = Server(engine or FakeEngine(), chosen, **(parts or {}))
  try:
    yield made
  finally:
    made.driver.stop(timeout=10)


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
  """Checks OpenAI's form of an error and returns it."""
  assert answer.status_code == status, answer.text
  error = answer.json()["error"]
  assert set(error) == {"message", "type", "param", "code"}
  assert error["message"]
  return error
