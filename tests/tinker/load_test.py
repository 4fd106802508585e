"""Many small requests, and clients that do not read their answers."""

import collections
import contextlib
import gc
import json
import re
import socket
import threading
import time

import httpx
import pytest

from tests.serve.fake_engine import FakeDriver, FakeEngine
from tests.tinker.serving import base
from tests.tinker.state.turns_test import until
from tunix.serve.app import make_app
from tunix.serve.server import make_server
from tunix.serve.settings import ServeSettings
from tunix.tinker import app as tinker_app
from tunix.tinker.service import Service
from tunix.tinker.settings import TinkerSettings

ROOT = "/api/v1/"


@contextlib.contextmanager
def served(folder, **limits):
  """Yields address and connections of a server with a scripted engine."""
  driver = FakeDriver(FakeEngine(rounds=64)).start()
  keys = {"ann": "tml-ann", "bob": "tml-bob"}
  settings = TinkerSettings(root=folder, keys=keys, max_pending=64, wait_seconds=1)
  service = Service(base(), settings, name="toy", driver=driver)
  chosen = ServeSettings(port=0, drain_timeout=1, **limits)
  app = make_app(driver, chosen, more=tinker_app.routes(service))
  started, found = threading.Event(), []
  on_start = lambda address: (found.append(address), started.set())
  made = make_server(app, chosen, on_start)
  thread = threading.Thread(target=made.run)
  thread.start()
  assert started.wait(60)
  try:
    yield found[0], made.server_state.connections
  finally:
    made.should_exit = True
    thread.join(60)
    service.close()
    driver.stop(60)


class Tenant:
  """Sends requests for samples."""

  def __init__(self, url, name):
    self.headers = {"X-API-Key": f"tml-{name}"}
    self.client = httpx.Client(base_url=url + ROOT, headers=self.headers, timeout=60)
    self.session = self.post("create_session").json()["session_id"]
    number = {"session_id": self.session, "sampling_session_seq_id": 0}
    made = self.post("create_sampling_session", **number).json()
    self.sampler, self.number = made["sampling_session_id"], 0

  def post(self, path, **body):
    return self.client.post(path, json=body)

  def sample(self, count=1, tokens=1, tops=0):
    self.number += 1
    return self.post(
      "asample",
      sampling_session_id=self.sampler,
      seq_id=self.number,
      prompt={"chunks": [{"tokens": [1, 2]}]},
      num_samples=count,
      sampling_params={"max_tokens": tokens},
      topk_sample_logprobs=tops,
    )

  def result(self, id):
    while True:
      found = self.post("retrieve_future", request_id=id).json()
      if found.get("type") != "try_again":
        return found


def reader(url, tenant, id):
  """Asks for a result, and reads none of it."""
  host, _, port = url.removeprefix("http://").partition(":")
  made = socket.socket()
  made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
  made.connect((host, int(port)))
  body = json.dumps({"request_id": id}).encode()
  head = f"POST {ROOT}retrieve_future HTTP/1.1\r\nHost: {host}\r\n"
  head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
  head += f"X-API-Key: {tenant.headers['X-API-Key']}\r\n"
  head += "Accept: application/x-protobuf\r\n\r\n"
  made.sendall(head.encode() + body)
  return made


def memory():
  """MiB of this process."""
  gc.collect()
  with open("/proc/self/statm") as file:
    return int(file.read().split()[1]) * 4096 / 2**20


def load(folder, requests, readers, threads):
  """Returns the MiB that readers and requests took, and the longest wait of bob."""
  with served(folder, client_timeout=0.5) as (url, connections):
    ann, bob = (Tenant(url, name) for name in ("ann", "bob"))
    large = ann.sample(128, 250, 20).json()["request_id"]
    ann.result(large)
    before = memory()
    slow = [reader(url, ann, large) for _ in range(readers)]
    codes, delays = collections.Counter(), []

    def send():
      mine = Tenant(url, "ann")
      for _ in range(requests // threads):
        codes[mine.sample().status_code] += 1
      mine.client.close()

    sending = [threading.Thread(target=send) for _ in range(threads)]
    for thread in sending:
      thread.start()
    while any(x.is_alive() for x in sending) or len(delays) < 10:
      begin = time.monotonic()
      assert "sequences" in bob.result(bob.sample().json()["request_id"])
      delays.append(time.monotonic() - begin)
      time.sleep(0.1)
    taken = memory() - before
    assert set(codes) <= {200, 429} and codes.total() == requests
    # Those of ann and bob; idle ones end after 30 s.
    until(lambda: len(connections) == 2, seconds=90)
    for one in slow:  # the server has left those that it sent the result
      head, _, body = rest_of(one).partition(b"\r\n\r\n")
      (size,) = re.findall(rb"content-length: (\d+)", head)
      assert len(body) < int(size) or b"try_again" in body
    for tenant in (ann, bob):
      tenant.client.close()
    return taken, max(delays)


def rest_of(connection):
  connection.settimeout(30)
  parts = []
  with connection, contextlib.suppress(ConnectionResetError):
    while part := connection.recv(2**20):
      parts.append(part)
  return b"".join(parts)


def test_slow_readers_are_left_and_another_tenant_is_served(tmp_path):
  load(tmp_path, 40, 4, 2)


@pytest.mark.slow
def test_ten_thousand_small_requests_and_fifty_slow_readers(tmp_path):
  taken, delay = load(tmp_path, 10_000, 50, 16)
  print(f"{taken:.0f} MiB, longest wait {delay:.2f} s")
  assert taken < 256 and delay < 20
