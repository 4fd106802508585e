"""Measures what attackers cost the other clients of a server.

    tunix serve MODEL --port 8000
    python -m benchmarks.attacked_server http://127.0.0.1:8000 [--seconds 60] [--key K]

Eight clients stream a short completion each, twice a second, for the given seconds:
first beside processes that only compute, then beside as many that attack the server
with long texts, half headers, many stop strings, huge counts and disconnects. Both run
at the lowest priority. Prints the times to the first token, and the ratio of their 95th
percentiles. A time begins when the request was due: a server that stands still delays
all requests of that time, and not only the eight that it holds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable

import httpx
import numpy as np

CLIENTS = 8
_HALF_HEADERS = 300
_WAIT_S = 60.0
_PERIOD_S = 0.5
_JSON = {"Content-Type": "application/json"}


class Server:
  """A server and how to ask it.

  Args:
    url: address without a path.
    key: API key, or None.
  """

  def __init__(self, url: str, key: str | None):
    self.url = url
    self.headers = {} if key is None else {"Authorization": f"Bearer {key}"}

  def model(self) -> str:
    """Returns the name of its first model."""
    with self.client() as client:
      return client.get("/v1/models").raise_for_status().json()["data"][0]["id"]

  def client(self) -> httpx.Client:
    return httpx.Client(base_url=self.url, headers=self.headers, timeout=_WAIT_S)

  def connect(self) -> socket.socket:
    address = urllib.parse.urlsplit(self.url)
    return socket.create_connection((address.hostname, address.port), _WAIT_S)


def honest(server: Server, model: str, until: float, times: list[float]) -> None:
  """Streams completions until a time; appends seconds from due to the first token.

  Raises:
    httpx.HTTPError: the server refuses or fails.
  """
  body = {"model": model, "prompt": "the sea is", "max_tokens": 16, "stream": True}
  due = time.monotonic()
  with server.client() as client:
    while due < until:
      time.sleep(max(0.0, due - time.monotonic()))
      with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        lines = (x for x in answer.iter_lines() if x.startswith("data: "))
        next(lines)
        times.append(time.monotonic() - due)
        for _ in lines:
          pass
      due += _PERIOD_S


def burn(server: Server, model: str) -> None:
  """Computes."""
  del server, model
  while True:
    sum(range(1_000_000))


def long_texts(server: Server, model: str) -> None:
  """Sends texts of 15 MB."""
  ask(server, {"model": model, "prompt": "the sea " * 1_800_000})


def stops(server: Server, model: str) -> None:
  """Sends 200,000 stop strings."""
  words = [f"{number:06}" for number in range(200_000)]
  ask(server, {"model": model, "prompt": "a", "max_tokens": 64, "stop": words})


def counts(server: Server, model: str) -> None:
  """Asks for very many choices and tokens."""
  ask(server, {"model": model, "prompt": "a", "max_tokens": 10**9, "n": 10**6})


def ask(server: Server, body: dict) -> None:
  """Sends one request again and again."""
  data = json.dumps(body).encode()
  while True:
    with contextlib.suppress(httpx.HTTPError), server.client() as client:
      client.post("/v1/completions", content=data, headers=_JSON)


def half_headers(server: Server, model: str) -> None:
  """Keeps connections that never send the end of their headers."""
  del model
  held: list[socket.socket] = []
  while True:
    with contextlib.suppress(OSError):
      connection = server.connect()
      connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-Slow: ")
      held.append(connection)
    if len(held) > _HALF_HEADERS:
      held.pop(0).close()
      time.sleep(0.01)


def disconnects(server: Server, model: str) -> None:
  """Leaves before the first token."""
  body = json.dumps({"model": model, "prompt": "a b", "max_tokens": 64}).encode()
  key = "".join(f"{name}: {value}\r\n" for name, value in server.headers.items())
  head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\n{key}"
  head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
  while True:
    with contextlib.suppress(OSError):
      connection = server.connect()
      connection.sendall(head.encode() + body)
      time.sleep(0.05)
      connection.close()


ATTACKS = (long_texts, half_headers, stops, counts, disconnects)


def phase(
  server: Server, model: str, seconds: float, beside: tuple[Callable, ...]
) -> np.ndarray:
  """Returns the times to the first token beside some processes, in seconds [N]."""
  others = [
    multiprocessing.Process(target=_nice, args=(target, server, model), daemon=True)
    for target in beside
  ]
  for process in others:
    process.start()
  time.sleep(1.0)
  until, times = time.monotonic() + seconds, list[float]()
  clients = [
    threading.Thread(target=honest, args=(server, model, until, times))
    for _ in range(CLIENTS)
  ]
  for thread in clients:
    thread.start()
  for thread in clients:
    thread.join()
  for process in others:
    process.kill()
    process.join()
  return np.asarray(times)


def _nice(target: Callable, server: Server, model: str) -> None:
  os.nice(19)
  target(server, model)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("url")
  parser.add_argument("--seconds", type=float, default=60.0)
  parser.add_argument("--key")
  args = parser.parse_args()
  server = Server(args.url, args.key)
  model = server.model()
  phase(server, model, 5.0, ())  # compiles
  high = []
  for name, beside in (("burners", (burn,) * len(ATTACKS)), ("attackers", ATTACKS)):
    times = phase(server, model, args.seconds, beside)
    middle, tail = np.percentile(times, [50, 95])
    high.append(tail)
    print(
      f"beside {len(beside)} {name}: {len(times)} first tokens, median "
      f"{middle * 1000:.0f} ms, p95 {tail * 1000:.0f} ms"
    )
  print(f"ratio of p95: {high[1] / high[0]:.2f}")


if __name__ == "__main__":
  main()
