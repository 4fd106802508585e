"""Many clients at the same time, of which some go away: `tunix serve` as a process.

Every request that its client waits for is answered whole. Afterwards no page is held,
and the process has as many descriptors and as much memory as before.
"""

import asyncio
import collections
import contextlib
import json
import pathlib
import random
import re
import time

import httpx
import pytest

from tests.cli import serve_test

CLIENTS = 64
SOON = 120.0  # seconds; a request on a busy machine
# The allocator keeps what a peak of the load took, and a peak differs between parts of
# a run. A page that is lost with each request would be far more.
SLACK_MB = 32
SIZES = ["--slots", 16, "--max_tokens", 256, "--cache_tokens", 2048]
KINDS = {"stream": 6, "whole": 2, "close": 2, "reset": 1, "give up": 1}


class Load:
  """Clients of a server until a time, and counts of what they did.

  Attributes:
    counts: requests by kind; those that a client ended on purpose as "cut".
  """

  def __init__(self, server, until):
    self.url, self.headers, self.until = server.url, server.headers, until
    self.counts = collections.Counter()

  async def run(self):
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    options = {"base_url": self.url, "headers": self.headers, "timeout": SOON}
    async with httpx.AsyncClient(**options, limits=limits) as client:
      await asyncio.gather(*(self.client(client, n) for n in range(CLIENTS)))

  async def client(self, client, number):
    rng = random.Random(number)
    while time.monotonic() < self.until:
      (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
      path, body = a_request(rng)
      if kind == "whole":
        answer = await client.post(path, json=body)
        self.check(answer.status_code, answer.text)
        assert answer.json()["usage"]["completion_tokens"] == tokens_of(body)
      elif kind == "stream":
        await self.stream(client, path, body, None)
      elif kind == "close":
        await self.stream(client, path, body, rng.randint(1, 3))
      elif kind == "give up":
        with contextlib.suppress(TimeoutError):
          async with asyncio.timeout(rng.uniform(0.05, 1.0)):
            await client.post(path, json=body)
      else:
        await self.reset(path, body, rng.uniform(0.05, 1.0))
      self.counts[kind] += 1

  async def stream(self, client, path, body, parts):
    """Reads a stream to its end, or closes it after some parts."""
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", path, json=body) as answer:
      self.check(answer.status_code)
      lines = []
      async for line in answer.aiter_lines():
        lines += [line] * bool(line)
        if len(lines) == parts:
          return
    assert lines[-1] == "data: [DONE]", lines[-2:]
    usage = json.loads(lines[-2].removeprefix("data: "))["usage"]
    assert usage["completion_tokens"] == tokens_of(body)

  async def reset(self, path, body, seconds):
    """Breaks the connection off, without a word to the server."""
    host, port = self.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    text = json.dumps({**body, "stream": True})
    head = {**self.headers, "Host": host, "Content-Length": len(text)}
    lines = [f"POST {path} HTTP/1.1", *(f"{k}: {v}" for k, v in head.items())]
    lines += ["Content-Type: application/json", "", text]
    writer.write("\r\n".join(lines).encode())
    await writer.drain()
    await asyncio.sleep(seconds)
    writer.transport.abort()

  @staticmethod
  def check(status, text=""):
    assert status == 200, (status, text)


def a_request(rng):
  """Returns a path and a body; some prompts share their beginning."""
  body = {"model": "tiny", "max_tokens": rng.randint(1, 60), "ignore_eos": True}
  body |= {"seed": rng.randrange(100), "temperature": rng.choice([0, 1])}
  text = " ".join(
    rng.choices(["the", "sea", "is", "five", "what"], k=rng.randint(1, 30))
  )
  text = rng.choice(["what is the sea, and why is it? " * 2, ""]) + text
  if rng.random() < 0.5:
    return "/v1/chat/completions", {
      **body, "messages": [{"role": "user", "content": text}]
    }  # fmt: skip
  return "/v1/completions", {**body, "prompt": text, "n": rng.choice([1, 1, 2])}


def tokens_of(body):
  return body["max_tokens"] * body.get("n", 1)


def metrics(server):
  text = httpx.get(f"{server.url}/metrics", headers=server.headers, timeout=SOON).text
  return {k: float(v) for k, v in re.findall(r"^(tunix_\S+) (\S+)$", text, re.M)}


def at_rest(server):
  """Waits until nothing runs or waits; returns (descriptors, memory in MB)."""
  names = ["requests_running", "requests_waiting", "engine_running", "engine_waiting"]
  end = time.monotonic() + SOON
  while any((found := metrics(server))[f"tunix_{name}"] for name in names):
    assert time.monotonic() < end, {name: found[f"tunix_{name}"] for name in names}
    time.sleep(0.1)
  assert found["tunix_engine_pages_free"] == found["tunix_engine_pages_total"]
  status = pathlib.Path(f"/proc/{server.process.pid}/status").read_text()
  memory = re.search(r"VmRSS:\s+(\d+)", status)
  assert memory
  return descriptors(server), int(memory[1]) / 1000


def descriptors(server):
  """Returns the fewest of a second: the server closes a connection after its client."""
  folder, found = pathlib.Path(f"/proc/{server.process.pid}/fd"), []
  for _ in range(10):
    found.append(len(list(folder.iterdir())))
    time.sleep(0.1)
  return min(found)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [pytest.param(8, marks=pytest.mark.ci), 60])
def test_clients_that_come_and_go(seconds, tmp_path):
  folder = serve_test.write_model(tmp_path / "tiny")
  with serve_test.serving(folder, *SIZES, fork=False) as server:
    counts, rests = collections.Counter(), []
    for share in (0.5, 0.25, 0.25):  # the first part compiles, and fills the cache
      load = Load(server, time.monotonic() + share * seconds)
      asyncio.run(load.run())
      counts += load.counts
      rests.append(at_rest(server))
    print(f"{dict(counts)}, (descriptors, MB) {rests}")
    answers = [name for name in metrics(server) if "http_requests_total" in name]
    assert all(re.search(r'status="(200|499)"', name) for name in answers), answers
    (_, (before, least), (after, most)) = rests
    assert after == before
    assert most - least < SLACK_MB
    assert min(counts[kind] for kind in KINDS) > 0, counts
    assert httpx.get(f"{server.url}/ready", timeout=SOON).status_code == 200
