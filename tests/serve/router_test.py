"""The router over real servers: two processes with a tiny model each."""

import contextlib
import http.server
import json
import pathlib
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

from tests import forks
from tests.serve.serving import error_of
from tunix.serve import server as server_lib
from tunix.serve.http.hosts import digests_of
from tunix.serve.router import make_router
from tunix.serve.settings import RouteSettings, ServeSettings

ROOT = pathlib.Path(__file__).parents[2]
SOON = 60.0
HOST = """
from tests import toys, toys_text
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.driver import Driver
from tunix.generate.engine.engine import Engine
from tunix.serve.server import serve
from tunix.serve.settings import ServeSettings
model = toys.model(vocab_size=600, num_layers=1, max_position=2048)
sizes = EngineConfig(max_tokens=1024, slots=2, prefill_tokens=256, rounds=4)
driver = Driver(Engine(model, toys_text.chat_tokenizer(), sizes))
settings = ServeSettings(port=0, api_key="of the hosts")
serve(driver, settings, on_start=lambda a: print(a, flush=True))
"""


@contextlib.contextmanager
def hosts(count, *, fork=True):
  """Yields (process, address) of servers; `fork`: see tests/forks.py."""
  popen = forks.popen if fork else subprocess.Popen
  with contextlib.ExitStack() as stack:
    started = []
    for _ in range(count):
      started.append(
        popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True, cwd=ROOT)
      )
      stack.callback(started[-1].stdout.close)
      stack.callback(started[-1].wait, SOON)
      stack.callback(started[-1].kill)
    yield [(process, process.stdout.readline().strip()) for process in started]


@contextlib.contextmanager
def routing(urls, **options):
  """Yields a client of a router, and its context."""
  chosen = ServeSettings(port=0, api_key="of the router", drain_timeout=1.0)
  options = {"host_key": "of the hosts", "check_interval": 0.2, **options}
  app = make_router(chosen, RouteSettings(urls=tuple(urls), **options))
  addresses, started = [], threading.Event()

  def on_start(address):
    addresses.append(address)
    started.set()

  server = server_lib.make_server(app, chosen, on_start)
  thread = threading.Thread(target=server.run, daemon=True)
  thread.start()
  assert started.wait(SOON)
  headers = {"Authorization": "Bearer of the router"}
  try:
    with httpx.Client(base_url=addresses[0], headers=headers, timeout=SOON) as client:
      yield client, app.state.context
  finally:
    server.should_exit = True
    thread.join(SOON)
  assert not thread.is_alive()


def complete(client, prompt, tokens=4, **more):
  body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}
  return client.post("/v1/completions", json={"ignore_eos": True, **body})


def cached(answer):
  assert answer.status_code == 200, answer.text
  return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_requests_go_to_the_host_with_the_prefix_and_survive_its_death():
  prompts = [[10 + n] * 400 for n in range(4)]
  with hosts(2) as started, routing([url for _, url in started]) as (client, context):
    assert client.get("/ready").json() == {"status": "ok"}
    assert client.get("/v1/models").json()["data"][0]["id"] == "default"
    assert httpx.get(f"{client.base_url}/v1/models").status_code == 401
    error_of(client.post("/pause", json={}), 404)
    error_of(complete(client, [1], n=0), 400)

    # Each prompt is prefilled on one host, and found there again.
    first = [cached(complete(client, prompt)) for prompt in prompts]
    again = [cached(complete(client, [*p, 5, 6])) for p in prompts]
    assert first == [0] * 4 and all(count >= 380 for count in again)

    # Under load one host is killed: streams that began there end with an error, all
    # other requests are answered.
    busy, outcomes = threading.Barrier(9), []

    def stream(number):
      body = {"prompt": [60 + number] * 300, "max_tokens": 600, "stream": True}
      busy.wait(SOON)
      url, json_body = "/v1/completions", {**body, "ignore_eos": True}
      with client.stream("POST", url, json=json_body) as answer:
        lines = [line for line in answer.iter_lines() if line]
      last = lines[-1].removeprefix("data: ")
      is_over = last == "[DONE]"
      code = None if is_over else json.loads(last)["error"]["code"]
      outcomes.append((len(lines), code))

    threads = [threading.Thread(target=stream, args=(n,)) for n in range(8)]
    for thread in threads:
      thread.start()
    busy.wait(SOON)
    until(lambda: all(host.running >= 2 for host in context.hosts))
    time.sleep(0.1)
    process, address = started[0]
    process.send_signal(signal.SIGKILL)
    for thread in threads:
      thread.join(SOON)
    assert len(outcomes) == 8
    assert {code for _, code in outcomes} <= {None, "host_failed"}
    assert all(lines > 1 for lines, code in outcomes if code is None)
    assert sum(code is None for _, code in outcomes) >= 4
    assert context.gate.running == 0
    assert not any(host.running for host in context.hosts)

    until(lambda: client.get("/ready").json()["status"] == "degraded")
    assert address in client.get("/ready").json()["reason"]
    for prompt in prompts:
      assert complete(client, prompt).status_code == 200
    assert "tunix_router_hosts_ready 1.0" in client.get("/metrics").text


def test_a_host_that_hangs_is_lost_and_its_request_goes_on_elsewhere():
  options = {"check_timeout": 0.5, "max_failed_checks": 2}
  # SIGSTOP does not reach a fork.
  with (
    hosts(2, fork=False) as started,
    routing([u for _, u in started], **options) as parts,
  ):
    client, context = parts
    prompt = [20] * 300
    complete(client, prompt)
    assert cached(complete(client, prompt)) > 0
    first = max(
      context.hosts,
      key=lambda h: bool(
        context.hosts._index.lengths(
          digests_of("/v1/completions", {"prompt": prompt}), [h.number]
        )[h.number]
      ),
    )
    process = started[first.number][0]
    process.send_signal(signal.SIGSTOP)  # connections stay open, and nothing answers
    began = time.monotonic()
    assert cached(complete(client, prompt)) == 0
    assert time.monotonic() - began < 20 and first.problem is not None
    process.send_signal(signal.SIGCONT)
    until(lambda: first.problem is None)
    for process, _ in started:
      process.kill()
    answer = complete(client, prompt)
    error = error_of(answer, 503)
    assert error["code"] == "no_host" and "http://127.0.0.1" in error["message"]
    assert "Retry-After" in answer.headers


def until(condition):
  end = time.monotonic() + SOON
  while not condition():
    assert time.monotonic() < end, "the condition did not come true"
    time.sleep(0.01)


def test_digests_of_prompts():
  digests = lambda **body: digests_of("/v1/chat/completions", body)
  turn = [{"role": "user", "content": "a" * 600}]
  more = [*turn, {"role": "assistant", "content": "b" * 600}]
  assert len(digests(messages=turn)) == 2
  assert digests(messages=more)[:2] == digests(messages=turn)
  assert digests(messages=turn, model="x")[0] != digests(messages=turn)[0]
  assert digests(messages=turn, tools=[1])[0] != digests(messages=turn)[0]
  assert digests(prompt="short") == digests(messages=3) == digests() == []


@pytest.mark.parametrize(
  "urls",
  [(), ("localhost:1",), ("http://a/b",), ("http://a:x",), ("http://a", "http://a/")],
)
def test_malformed_addresses_are_refused(urls):
  with pytest.raises(ValueError, match="urls"):
    RouteSettings(urls=urls)


@pytest.mark.parametrize("model", ["%2e%2e/%2e%2e/metrics", "a/%2e%2e/%2e", "..%5cx"])
def test_a_model_name_does_not_lead_to_other_routes_of_a_host(model):
  asked = []

  class Host(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
      asked.append(self.path)
      self.send_response(200)
      self.send_header("Content-Length", "2")
      self.end_headers()
      self.wfile.write(b"{}")

    def log_message(self, *args):
      pass

  host = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Host)
  threading.Thread(target=host.serve_forever, daemon=True).start()
  try:
    with routing([f"http://127.0.0.1:{host.server_port}"]) as (client, _):
      error_of(client.get(f"/v1/models/{model}"), 404)
      assert client.get("/v1/models/of/a..b").status_code == 200
  finally:
    host.shutdown()
    host.server_close()
  assert set(asked) == {"/ready", "/v1/models/of/a..b"}
