"""Connections that send nothing, half a header, or too many requests."""

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time

import httpx
import pytest

from tests.serve.fake_engine import FakeEngine
from tests.serve.server_test import listening
from tests.serve.serving import error_of
from tunix.serve.http import connections as connections_lib
from tunix.serve.http.connections import Connections
from tunix.serve.settings import ServeSettings

BODY = {"prompt": [60], "max_tokens": 8}
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: "


@contextlib.contextmanager
def half_headers(address, count):
  """Yields sockets that have sent half a header."""
  host, port = address.removeprefix("http://").split(":")
  with contextlib.ExitStack() as stack:
    made = []
    for _ in range(count):
      made.append(stack.enter_context(socket.create_connection((host, int(port)))))
      made[-1].sendall(HALF)
    yield made


def test_half_headers_and_idle_connections_are_no_requests():
  few = {"max_concurrent": 1, "max_queue": 0, "max_address_requests": 1}
  with listening(FakeEngine(), **few) as (address, _, _), half_headers(address, 200):
    answer = httpx.post(f"{address}/v1/completions", json=BODY, timeout=20)
    assert answer.status_code == 200
    assert httpx.get(f"{address}/health", timeout=20).status_code == 200


@pytest.mark.parametrize(
  "first", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"]
)
def test_a_header_has_a_limit_of_time_that_no_byte_renews(first):
  with listening(FakeEngine(), header_timeout=0.2) as (address, _, _):
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as slow:
      if first:  # a connection that is kept alive
        slow.sendall(first)
        assert b"200 OK" in slow.recv(4096)
      slow.sendall(HALF)
      closed = False
      for _ in range(1000):
        try:
          slow.sendall(b"a")
        except OSError:
          closed = True
          break
        time.sleep(0.02)
      assert closed


def test_a_silent_connection_is_closed():
  with listening(FakeEngine(), header_timeout=0.1) as (address, _, _):
    host, port = address.removeprefix("http://").split(":")
    silent = socket.create_connection((host, int(port)), timeout=20)
    with silent, contextlib.suppress(ConnectionResetError):
      assert silent.recv(10) == b""


def test_requests_may_take_longer_than_a_header():
  with listening(FakeEngine(), header_timeout=0.1) as (address, driver, _):
    driver.pause("keep")
    timer = threading.Timer(0.4, driver.resume)
    timer.start()
    answer = httpx.post(f"{address}/v1/completions", json=BODY, timeout=20)
    assert answer.status_code == 200


@pytest.mark.parametrize("proxies", [(), ("127.0.0.1",), ("127.0.0.0/8",)])
def test_an_address_has_a_number_of_requests_unless_it_is_a_proxy(proxies):
  engine = FakeEngine(rounds=1)
  engine.hold_at = 2
  limits = {"max_address_requests": 2, "proxies": proxies}
  with listening(engine, **limits) as (address, _, _), contextlib.ExitStack() as stack:
    url = f"{address}/v1/completions"
    for _ in range(2):
      body = {**BODY, "stream": True}
      stack.enter_context(httpx.stream("POST", url, json=body, timeout=20))
    status = httpx.get(f"{address}/v1/models", timeout=20)
    if proxies:
      assert status.status_code == 200
    else:
      error = error_of(status, 429)
      assert error["code"] == "too_many_requests"
      assert status.headers["connection"] == "close"
      assert int(status.headers["retry-after"]) >= 1
    for path in ("/health", "/ready"):
      assert httpx.get(f"{address}{path}", timeout=20).status_code == 200


def test_an_idle_connection_gives_its_place_to_a_new_one(monkeypatch):
  monkeypatch.setattr(connections_lib, "_MOST_IDLE", 2)
  with listening(FakeEngine()) as (address, _, _):
    host = address.removeprefix("http://")
    idle = http.client.HTTPConnection(host, timeout=20)
    idle.request("GET", "/health")
    idle.getresponse().read()
    with half_headers(address, 2):
      with contextlib.suppress(ConnectionResetError):
        assert idle.sock.recv(10) == b""
      assert httpx.get(f"{address}/v1/models", timeout=20).status_code == 200
    idle.close()


class Peer:
  """A connection that only counts its ends."""

  def __init__(self):
    self.aborted = 0

  def abort(self):
    self.aborted += 1


def test_the_address_with_the_most_idle_connections_loses_its_oldest(monkeypatch):
  monkeypatch.setattr(connections_lib, "_MOST_IDLE", 4)
  held = Connections(ServeSettings(proxies=("10.0.0.9",)))
  # The connections of the proxy do not count, and the second of "b" has a request.
  hosts = ["10.0.0.9"] * 9 + ["10.0.0.1", "10.0.0.2", "10.0.0.2", *["10.0.0.3"] * 4]
  peers = [(Peer(), held.address(host)) for host in hosts]
  for number, (peer, address) in enumerate(peers):
    held.mark(peer, address, is_idle=True)
    if number == 11:
      held.mark(peer, address, is_idle=False)
  assert [peer.aborted for peer, _ in peers[9:]] == [0, 0, 0, 1, 1, 0, 0]
  for peer, address in (*peers, *peers):  # also a second time
    held.mark(peer, address, is_idle=False)
  assert not held._idle


@pytest.mark.parametrize(
  ("hosts", "is_one"),
  [
    (["2001:db8::1", "2001:db8::ffff"], True),
    (["fe80::1%eth0", "fe80::2%eth0"], True),
    (["2001:db8::1", "2001:db8:0:1::1"], False),
    (["10.0.0.1", "10.0.0.1"], True),
    (["10.0.0.1", "10.0.0.2"], False),
  ],
)
def test_what_counts_as_one_address(hosts, is_one):
  held = Connections(ServeSettings(max_address_requests=1))
  first, second = map(held.address, hosts)
  with held.request(first):
    assert (held.problem(second) is not None) == is_one
    assert held.problem(held.address(None)) is None
  assert held.problem(second) is None and not held._requests


def test_requests_in_flight_have_a_bound_and_probes_have_none():
  held = Connections(ServeSettings(max_concurrent=1, max_queue=2))
  sent, go = [], asyncio.Event()

  async def app(scope, receive, send):
    await go.wait()

  async def send(message):
    sent.append(message)

  async def run():
    answer = connections_lib.bounded(app, held, None)
    call = lambda path: asyncio.ensure_future(answer({"path": path}, None, send))
    running = [call("/v1/models") for _ in range(1 + 2 + 128)]
    await asyncio.sleep(0)
    await call("/v1/models")
    probe = call("/health")
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(probe, *running)

  asyncio.run(run())
  assert sent[0]["status"] == 429 and len(sent) == 2
  assert json.loads(sent[1]["body"])["error"]["code"] == "too_many_requests"
