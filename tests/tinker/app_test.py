"""The routes without the SDK: access, JSON bodies, limits and errors."""

import asyncio
import importlib.util
import pathlib
import re
import threading
import types

import httpx
import pytest

from tests.serve.fake_engine import FakeDriver, FakeEngine
from tests.tinker.serving import base
from tunix.cli.commands import serve
from tunix.serve.app import make_app
from tunix.serve.http import guard
from tunix.serve.http.errors import ApiError
from tunix.serve.settings import ServeSettings
from tunix.tinker import app as tinker_app, requests, rest
from tunix.tinker.service import Service
from tunix.tinker.settings import TinkerSettings
from tunix.tinker.work.loaded_adapters import LoadedAdapters

ROOT = "/api/v1/"


class Client:
  """Calls the routes of an application, as one tenant."""

  def __init__(self, app, key):
    self._app, self._key = app, key

  def __call__(self, method, path, body=None, **options):
    headers = {"X-API-Key": self._key, **options.pop("headers", {})}

    async def run():
      transport = httpx.ASGITransport(self._app)
      address = {"transport": transport, "base_url": "http://127.0.0.1:8000"}
      async with httpx.AsyncClient(**address, timeout=60) as client:
        return await client.request(
          method,
          path if path[0] == "/" else ROOT + path,
          json=body,
          headers=headers,
          **options,
        )

    return asyncio.run(run())

  def post(self, path, **body):
    return self("POST", path, body)

  def result(self, id):
    while True:
      found = self.post("retrieve_future", request_id=id).json()
      if found.get("type") != "try_again":
        return found


@pytest.fixture(scope="module")
def clients():
  keys = {"ann": "tml-ann", "bob": "tml-bob"}
  settings = TinkerSettings(keys=keys, wait_seconds=0.2, max_pending=4)
  service = Service(base(), settings, name="toy")
  driver = FakeDriver(FakeEngine()).start()
  chosen = ServeSettings(max_body_bytes=200_000)
  app = make_app(driver, chosen, more=tinker_app.routes(service))
  yield {name: Client(app, key) for name, key in {**keys, "eve": "tml-eve"}.items()}
  service.close()
  driver.stop(10)


def model_of(client):
  session = client.post("create_session", tags=[]).json()["session_id"]
  made = client.post(
    "create_model",
    session_id=session,
    model_seq_id=0,
    base_model="toy",
    lora_config={"rank": 2, "seed": 0},
  ).json()
  assert client.result(made["request_id"]) == {
    "model_id": made["model_id"],
    "type": "create_model",
  }
  return session, made["model_id"]


def body(model, number, loss="cross_entropy", name="forward_backward_input"):
  tokens = {"data": [2, 3, 4], "dtype": "int64", "shape": [3]}
  datum = {
    "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
    "loss_fn_inputs": {"target_tokens": tokens},
  }
  return {
    "model_id": model,
    "seq_id": number,
    name: {"data": [datum], "loss_fn": loss},
  }


def test_json_bodies_and_results(clients):
  ann = clients["ann"]
  session, model = model_of(ann)
  losses = []
  for number, name in ((1, "forward"), (2, "forward_backward")):
    sent = ann.post(name, **body(model, number, name=f"{name}_input"))
    assert sent.status_code == 200, sent.text
    found = ann.result(sent.json()["request_id"])
    losses.append(found["metrics"]["loss:sum"])
    assert found["loss_fn_outputs"][0]["logprobs"]["shape"] == [3]
  assert losses[0] == losses[1]
  again = ann.post("forward_backward", **body(model, 2))
  assert again.json()["request_id"] == f"{model}:2"
  other = ann.post("forward_backward", **body(model, 2, "ppo"))
  assert (other.status_code, other.json()["error"]["code"]) == (400, "conflict")
  sent = ann.post("optim_step", model_id=model, seq_id=3, adam_params={})
  assert ann.result(sent.json()["request_id"])["metrics"]["grad_norm"] > 0
  sent = ann.post("forward_backward", **body(model, 4, "custom"))
  failed = ann.result(sent.json()["request_id"])
  assert failed["category"] == "user" and "which this service" in failed["error"]
  dimuon = {"type": "dimuon", "learning_rate": 0.1}
  sent = ann.post("optim_step", model_id=model, seq_id=5, optimizer_params=dimuon)
  error = ann.result(sent.json()["request_id"])["error"]
  assert "'dimuon'" in error and "published formula of it; expected adamw" in error
  waiting = ann.post("optim_step", model_id=model, seq_id=7, adam_params={}).json()
  found = ann.post("retrieve_future", request_id=waiting["request_id"]).json()
  assert (found["type"], found["queue_state"]) == ("try_again", "active")
  runs = ann("GET", "training_runs?limit=1").json()
  assert runs["training_runs"][0]["training_run_id"] == model
  assert ann("GET", f"sessions/{session}").json()["training_run_ids"] == [model]


def test_access(clients):
  ann, bob, eve = (clients[name] for name in ("ann", "bob", "eve"))
  assert eve.post("create_session", tags=[]).status_code == 401
  as_bearer = {"X-API-Key": "", "Authorization": "Bearer tml-ann"}
  assert ann("GET", "healthz", headers=as_bearer).json() == {"status": "ok"}
  session, model = model_of(ann)
  for answer in (
    bob.post("session_heartbeat", session_id=session),
    bob.post("get_info", model_id=model),
    bob.post("retrieve_future", request_id=f"{model}:0"),
    bob.post("optim_step", model_id=model, seq_id=1, adam_params={}),
    bob("GET", f"training_runs/{model}"),
    bob("GET", f"training_runs/{model}/checkpoints"),
    bob("DELETE", f"training_runs/{model}/checkpoints/weights/x"),
    ann.post("retrieve_future", request_id=f"{model}:9"),
    ann("GET", f"training_runs/{model}/checkpoints/weights/x/archive"),
  ):
    assert answer.status_code == 404, answer.text
    assert answer.json()["error"]["code"] == "not_found"


def test_refusals_have_names(clients):
  ann = clients["ann"]
  session, model = model_of(ann)
  optimizer = {"type": "dimuon"}
  fields = {"session_id": session, "model_seq_id": 1, "base_model": "toy"}
  for answer, word in (
    (ann.post("create_custom_loss"), "forward_backward_custom"),
    (ann.post("save_weights_external"), "external weights"),
    (ann.post("sessions/search"), "search of sessions"),
    (ann("PUT", f"sessions/{session}/project", {}), "projects"),
    (ann("POST", f"training_runs/{model}/checkpoints/weights/x/publish"), "public"),
    (ann.post("create_model", **fields, optimizer_config=optimizer), "dimuon"),
    (
      ann.post("asample", sampling_session_id="x", seq_id=0, prompt={"chunks": []}),
      "eng",
    ),
  ):
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "not_served"
    assert word in answer.json()["error"]["message"]
  wrong = ann.post("create_model", **fields, lora_config={"rank": 0})
  assert wrong.status_code == 400 and "rank is 0" in wrong.json()["error"]["message"]
  wrong = ann.post("optim_step", model_id=model, seq_id="1")
  assert "seq_id is '1'; expected an integer" in wrong.json()["error"]["message"]
  assert ann("POST", "telemetry", {"events": []}).json() == {"status": "accepted"}
  large = ann.post("telemetry", events=["x" * 200_000])
  assert large.status_code == 413
  assert ann("POST", "create_session", content=b"x").status_code == 415
  for number in (2, 3, 4, 5):
    ann.post("optim_step", model_id=model, seq_id=number, adam_params={})
  full = ann.post("optim_step", model_id=model, seq_id=6, adam_params={})
  assert full.status_code == 429 and full.headers["Retry-After"]


def test_each_route_of_the_sdk_is_served_or_refused_by_name():
  found = importlib.util.find_spec("tinker")
  if found is None:
    pytest.skip("the SDK is not installed")
  (folder,) = found.submodule_search_locations
  called = set()
  for file in pathlib.Path(folder).rglob("*.py"):
    if not file.name.endswith("_test.py"):
      called |= set(re.findall(r'"/api/v1/([^"?]+)"', file.read_text("utf-8")))
  assert len(called) > 30
  served = ["retrieve_future", *(path for _, path in requests.ROUTES | rest.ROUTES)]
  known = [re.sub(r"{\w+(:path)?}", ".+", x) for x in served]
  for path in called:
    sent = re.sub(r"{.*?}", "x", path)
    assert any(re.fullmatch(x, sent) for x in known), path


def test_the_settings_of_the_command(tmp_path):
  keys = tmp_path / "keys"
  keys.write_text("ann tml-1\n")

  def made(*words):
    return serve.parser().read(["my-model", *map(str, words)])

  assert serve._tinker_settings(made()) is None
  args = made("--tinker", "--tinker_root", tmp_path, "--tinker_keys", keys)
  settings = serve._tinker_settings(args)
  assert (settings.root, settings.keys) == (tmp_path, {"ann": "tml-1"})
  assert serve._config(args).adapter_ranks == 64
  assert serve._config(made()).adapter_ranks == 0
  with pytest.raises(ValueError, match="one engine on one device"):
    serve._tinker_settings(made("--tinker", "--tp", 2))


def bomb(window):
  """A frame of zstd of 128 KiB that inflates to 4 GiB of zeros."""
  head = b"\x28\xb5\x2f\xfd" + bytes([0, (window - 10) << 3])
  zeros = (2**17 << 3 | 1 << 1).to_bytes(3, "little") + b"\0"  # a block: 2^17 times 0
  return head + 2**15 * zeros


@pytest.mark.parametrize("knows_size", [True, False])
def test_compressed_bodies_are_whole(clients, knows_size):
  zstandard = pytest.importorskip("zstandard")
  press = zstandard.ZstdCompressor(write_content_size=knows_size).compress
  body = press(b'{"sdk_version": "' + bytes(range(48, 58)) * 50 + b'"}')
  headers = {"Content-Encoding": "zstd", "Content-Type": "application/json"}
  send = lambda data: clients["ann"](
    "POST", "client/config", headers=headers, content=data
  )
  assert send(body).status_code == 200
  for cut, message in (
    (body[:-3], "ends early"),
    (b"[]", "no zstd data"),
    (bomb(window=27), "too much memory"),
  ):
    answer = send(cut)
    assert answer.status_code == 400 and message in answer.text
  for size in range(len(body)):
    with pytest.raises(ApiError, match=r"ends early|no zstd data"):
      tinker_app._inflated(body[:size], 2**20)
  assert send(bomb(window=17)).status_code == 413
  answer = send(press(bytes(200_001)))
  assert answer.status_code == 413


def test_a_large_result_is_not_overtaken_by_small_ones():
  sending, most = tinker_app._Sending(), tinker_app._SENT
  assert sending.begins("a", "first", 1)
  sending.leave("a", "first")
  assert not sending.begins("a", "large", 2 * most)
  assert not sending.begins("a", "small", 1)
  assert sending.begins("b", "other", 1)
  sending.end("a", 1)
  assert not sending.begins("a", "small", 1)
  assert sending.begins("a", "large", 2 * most)
  sending.leave("a", "large")
  sending.leave("a", "small")  # its client has gone
  sending.end("a", 2 * most)
  assert sending.begins("a", "next", most)


def test_a_drain_stops_the_service_at_once():
  """So a kill within `drain_timeout` is no start of the requests that run."""
  stopped = threading.Event()
  service = types.SimpleNamespace(
    settings=TinkerSettings(), listen=lambda ring: None, stop=stopped.set
  )
  driver = FakeDriver(FakeEngine())
  app = make_app(driver, ServeSettings(), more=tinker_app.routes(service))
  assert not stopped.is_set()
  app.state.context.start_drain()
  app.state.context.start_drain()
  assert stopped.wait(10)


@pytest.mark.parametrize("admin", [None, "tml-admin"])
def test_the_other_routes_need_a_key_and_show_own_models(admin):
  keys = {"ann": "tml-ann", "bob": "tml-bob"}
  service = Service(base(), TinkerSettings(keys=keys), name="toy")
  driver = FakeDriver(FakeEngine()).start()
  settings = ServeSettings(api_key=admin, model_name="toy")
  app = make_app(driver, settings, more=tinker_app.routes(service))
  try:
    _, run = model_of(Client(app, "tml-ann"))
    path = f"tinker://{run}/sampler_weights/x"
    driver.engine.loaded[path] = None

    def send(key, method, route, **body):
      return Client(app, key)(method, route, body or None)

    def listed(key):
      return [x["id"] for x in send(key, "GET", "/v1/models").json()["data"]]

    asked = {"model": path, "prompt": "x", "max_tokens": 2}
    for route in app.routes:
      if not route.path.startswith("/api/") and route.path not in guard.OPEN_PATHS:
        for method in route.methods - {"HEAD"}:
          for key in ("", "tml-eve"):
            assert send(key, method, route.path).status_code == 401, route.path
    assert send("", "GET", "/health").status_code == 200
    assert (listed("tml-ann"), listed("tml-bob")) == (["toy", path], ["toy"])
    sampled = lambda key: send(key, "POST", "/v1/completions", **asked)
    assert sampled("tml-ann").status_code == 200, sampled("tml-ann").text
    assert (
      sampled("tml-bob").status_code == 404
      and run
      not in (sampled("tml-bob").json()["error"]["message"].partition("expected")[2])
    )
    for method, route in (("GET", "/metrics"), ("POST", "/pause")):
      assert send("tml-ann", method, route).status_code == 403
    if admin:
      assert listed(admin) == ["toy", path]
      assert send(admin, "GET", "/metrics").status_code == 200
  finally:
    service.close()
    driver.stop(10)


def test_an_adapter_that_the_administrator_unloads_is_loaded_again():
  loaded = {}
  engine = types.SimpleNamespace(
    adapters=loaded, load_adapter=loaded.__setitem__, unload_adapter=loaded.__delitem__
  )
  driver = types.SimpleNamespace(
    engine=engine, call=lambda function, seconds: function(engine)
  )
  path = "tinker://run/sampler_weights/x"
  adapters = LoadedAdapters(driver, lambda place: {})
  for _ in range(2):
    adapters.use(path)
    assert list(loaded) == [path]
    adapters.release(path)
    engine.unload_adapter(path)
