import asyncio
import json

import pytest

from tests.serve.fake_engine import FakeEngine
from tests.serve.serving import error_of, server
from tunix.serve import status
from tunix.serve.http.guard import OPEN_PATHS

PATH = "/v1/completions"
BODY = {"prompt": [60, 61], "max_tokens": 6}
LONG = {"prompt": [60, 61], "max_tokens": 200}


async def until(condition):
  for _ in range(4000):
    if condition():
      return
    await asyncio.sleep(0.002)
  raise AssertionError("the condition did not come true")


def test_the_key_guards_every_route_but_probes_and_page():
  with server(api_key="secret") as made:
    for route in made.app.routes:
      path, method = (
        route.path.replace("{model:path}", "default"),
        *route.methods - {"HEAD"},
      )
      for header in (None, "Bearer wrong", "Bearer ", "secret", "Basic secret"):
        headers = {} if header is None else {"Authorization": header}
        answer = made.call(method, path, headers=headers)
        assert (answer.status_code == 401) == (path not in OPEN_PATHS), (path, header)
    error = error_of(made.post(PATH, BODY), 401)
    assert error["code"] == "invalid_api_key"
    good = {"Authorization": "Bearer secret"}
    assert made.post(PATH, BODY, headers=good).status_code == 200
    assert not made.engine.rows and len(made.engine.submitted) == 1


def test_foreign_pages_are_refused_where_there_is_no_key():
  with server() as made:
    for headers in (
      {"Host": "evil.example"},
      {"Origin": "https://evil.example"},
      {"Origin": "null"},
      {"Origin": "http://["},
      {"Host": "[::1"},
    ):
      error_of(made.post(PATH, BODY, headers=headers), 403)
    # A page may send a form without asking the browser, but not this type.
    form = {"Content-Type": "text/plain"}
    answer = made.call("POST", PATH, headers=form, content=json.dumps(BODY))
    error_of(answer, 415)
    assert not made.engine.submitted
    for host in ("localhost:8000", "127.0.0.1", "[::1]:8000"):
      own = {"Host": host, "Origin": f"http://{host}"}
      assert made.post(PATH, BODY, headers=own).status_code == 200


@pytest.mark.parametrize(
  "data",
  [
    *(
      b"",
      b"{",
      b"[1]",
      b"3",
      b"null",
      b"\xff",
      b"[" * 100_000,
      b'{"n": ' + b"9" * 5000,
    ),
    *(b'{"temperature": NaN}', b'{"temperature": 1e999}', b'{"prompt": "\\ud800"}'),
    *(b'{"n": 1e3}', b'{"prompt": {"a": 1}}', b'{"\\u0000": 1}'),
  ],
)
@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/tokenize"])
def test_malformed_bodies_are_400(made_once, path, data):
  kind = {"Content-Type": "application/json"}
  error_of(made_once.call("POST", path, headers=kind, content=data), 400)


@pytest.fixture(scope="module")
def made_once():
  with server() as made:
    yield made


def test_unknown_paths_methods_and_large_bodies():
  with server(max_body_bytes=100, max_prompt_tokens=3) as made:
    error_of(made.get("/v1/nothing"), 404)
    error_of(made.get("/../../etc/passwd"), 404)
    error_of(made.get("/health/"), 404)
    error_of(made.get(PATH), 405)
    error_of(made.post(PATH, {"prompt": "x" * 200}), 413)

    async def parts():  # without a length in the header
      for _ in range(20):
        yield b" " * 10

    kind = {"Content-Type": "application/json"}
    error_of(made.call("POST", PATH, headers=kind, content=parts()), 413)
    error = error_of(made.post(PATH, {"prompt": [1, 2, 3, 4]}), 400)
    assert error["code"] == "context_length_exceeded"
    error = error_of(made.post(PATH, {"prompt": [1], "max_tokens": 256}), 400)
    assert "maximum context length of this server is 256" in error["message"]


def test_a_full_server_says_when_to_come_back():
  with server(max_concurrent=1, max_queue=1, queue_timeout=0.1, retry_after=3) as made:
    made.driver.pause("keep")

    async def run():
      async with made.client() as client:
        first = asyncio.create_task(client.post(PATH, json=BODY))
        await until(lambda: made.engine.rows)
        second = asyncio.create_task(client.post(PATH, json=BODY))
        await until(lambda: made.context.gate.waiting)
        third = await client.post(PATH, json=BODY)
        assert error_of(third, 429)["code"] == "queue_full"
        assert third.headers["retry-after"] == "3"
        error_of(await second, 429)  # its wait is bounded
        made.driver.resume()
        assert (await first).status_code == 200
        assert (await client.post(PATH, json=BODY)).status_code == 200

    asyncio.run(run())
    assert made.context.gate.running == made.context.gate.waiting == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_its_requests(stream):
  """Raw ASGI: the test says when the client disconnects."""
  with server(FakeEngine(rounds=1)) as made:
    made.engine.hold_at = 5 if stream else 0
    body = json.dumps({**LONG, "n": 2, "stream": stream}).encode()
    sent = []

    async def run():
      leaves = asyncio.Event()
      incoming = [{"type": "http.request", "body": body, "more_body": False}]

      async def receive():
        if incoming:
          return incoming.pop()
        await leaves.wait()
        return {"type": "http.disconnect"}

      async def send(message):
        sent.append(message)
        if message["type"] == "http.response.body":
          leaves.set()

      headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
      scope = {
        "type": "http",
        "method": "POST",
        "path": PATH,
        "raw_path": PATH.encode(),
        "query_string": b"",
        "headers": headers,
      }
      work = asyncio.create_task(made.app(scope, receive, send))
      if not stream:
        await until(lambda: made.engine.rows)
        leaves.set()
      async with asyncio.timeout(10):
        await work
      assert len(made.engine.cancelled) == 1
      await until(lambda: not made.engine.rows)

    asyncio.run(run())
    assert bool(sent) == stream
    assert made.context.gate.running == 0
    assert 'status="499"' in made.get("/metrics").text


def test_requests_that_fail_get_an_error_of_their_own():
  with server() as made:
    made.engine.failing = "request 0: the logits after token 3 are not finite"
    for stream in (False, True):
      error = error_of(made.post(PATH, {**BODY, "stream": stream}), 500)
      assert error["code"] == "request_failed" and "not finite" in error["message"]
    made.engine.failing = None
    assert made.post(PATH, BODY).status_code == 200
    assert made.get("/health").status_code == 200


def test_an_engine_that_dies_answers_everybody_and_turns_unready():
  engine = FakeEngine(rounds=1)
  with server(engine) as made:

    async def run():
      async with made.client() as client:
        await client.post("/pause?mode=keep")
        whole = [asyncio.create_task(client.post(PATH, json=LONG)) for _ in range(3)]
        await until(lambda: len(engine.rows) == 3)
        engine.broken = RuntimeError("out of memory")
        made.driver.resume()
        for answer in await asyncio.gather(*whole):
          error = error_of(answer, 503)
          assert error["code"] == "engine_dead" and "out of memory" in error["message"]
        for path in ("/health", "/ready"):
          assert (await client.get(path)).status_code == 503
        error_of(await client.post(PATH, json=BODY), 503)
        error_of(await client.post("/pause"), 503)
        error_of(await client.post("/v1/chat/completions", json=BODY), 503)

    asyncio.run(run())


def test_an_error_in_a_stream_is_its_last_event():
  engine = FakeEngine(rounds=1)
  with server(engine) as made:
    advance = engine._advance

    def breaking(row):
      advance(row)
      if row.given == 5:
        engine.broken = RuntimeError("boom")

    engine._advance = breaking
    answer = made.post(PATH, {**LONG, "stream": True})
    events = [line for line in answer.text.split("\n\n") if line]
    assert answer.status_code == 200 and len(events) == 6
    last = json.loads(events[-1].removeprefix("data: "))["error"]
    assert last["code"] == "engine_dead" and "boom" in last["message"]


def test_requests_have_a_bounded_time():
  with server(request_timeout=0.1) as made:
    made.driver.pause("keep")
    for stream in (False, True):
      error = error_of(made.post(PATH, {**BODY, "stream": stream}), 504)
      assert error["code"] == "timeout"
    assert len(made.engine.cancelled) == 2


def test_bugs_are_500_and_tell_nothing(caplog):
  with server() as made:
    made.engine.submit = lambda *_, **__: {}["/etc/secret"]
    error = error_of(made.post(PATH, BODY), 500)
    assert error["code"] == "internal_error" and "secret" not in error["message"]
    assert "secret" in caplog.text


def test_metrics_count_requests_and_read_the_engine():
  with server() as made:
    made.post(PATH, BODY)
    made.post(PATH, {**BODY, "stream": True})
    made.post(PATH, {})
    text = made.get("/metrics").text
    name = "tunix_http_requests_total"
    assert f'{name}{{route="{PATH}",status="200"}} 2.0' in text
    assert f'{name}{{route="{PATH}",status="400"}} 1.0' in text
    assert "tunix_first_token_seconds_count 1.0" in text
    assert "tunix_engine_generated_tokens_total 12.0" in text
    assert "tunix_engine_weights_version 7.0" in text
    assert "tunix_requests_running 0.0" in text


SCOPE = {
  "type": "http",
  "method": "POST",
  "path": PATH,
  "raw_path": PATH.encode(),
  "query_string": b"",
  "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
}


def test_clients_that_stop_sending_or_taking_are_left():
  with server(FakeEngine(rounds=1), client_timeout=0.1) as made:
    sent = []

    async def send(message):
      sent.append(message)
      if message.get("more_body"):
        await asyncio.Event().wait()  # a client that reads no more

    async def run(*incoming):
      left = list(incoming)

      async def receive():
        return left.pop(0) if left else await asyncio.Event().wait()

      async with asyncio.timeout(10):
        await made.app(dict(SCOPE), receive, send)

    half = {"type": "http.request", "body": b"{", "more_body": True}
    asyncio.run(run(half))
    assert [m.get("status") for m in sent] == [408, None]
    sent.clear()
    made.engine.hold_at = 5
    body = json.dumps({**LONG, "stream": True}).encode()
    asyncio.run(run({"type": "http.request", "body": body, "more_body": False}))
    assert len(made.engine.cancelled) == 1 and made.context.gate.running == 0


def test_a_client_that_leaves_the_queue_gives_its_place_up():
  with server(max_concurrent=1) as made:
    made.driver.pause("keep")

    async def run():
      async with made.client() as client:
        first = asyncio.create_task(client.post(PATH, json=BODY))
        await until(lambda: made.context.gate.running)
        second = asyncio.create_task(client.post(PATH, json=BODY))
        await until(lambda: made.context.gate.waiting)
        second.cancel()
        await until(lambda: not made.context.gate.waiting)
        made.driver.resume()
        return await first

    assert asyncio.run(run()).status_code == 200
    assert made.context.gate.running == 0 and len(made.engine.submitted) == 1


def test_the_page_is_served_if_there_is_one(tmp_path, monkeypatch):
  page = tmp_path / "page.html"
  monkeypatch.setattr(status, "_PAGE", page)
  with server(api_key="secret") as made:
    error_of(made.get("/"), 404)
    page.write_text("<p>hello</p>")
    answer = made.get("/")
    assert answer.text == "<p>hello</p>"
    assert "connect-src 'self'" in answer.headers["content-security-policy"]


NASTY = [
  *(True, -1, 0, 1, 2**40, 2**70, 0.5, 1e300, "", "a", "1", "\0", "é" * 50),
  *([], [""], [[]], [1], [-1], [2**40], [None], [{}], [[1], "a"], ["a", 1]),
  *({}, {"a": 1}, {"1": 1}, {"type": 1}, {"type": "text"}, {"type": "json_schema"}),
  *([{"role": "user", "content": 1}], [{"role": "user", "content": [{}]}]),
  *([{"type": "function", "function": {"name": "a"}}], {"include_usage": 1}),
]
FIELDS = {
  PATH: (
    {"prompt": "a"},
    "prompt max_tokens n temperature top_p top_k min_p seed stop stop_token_ids echo "
    "logit_bias logprobs prompt_logprobs stream stream_options model request_id suffix "
    "response_format structured_outputs ignore_eos priority add_special_tokens",
  ),
  "/v1/chat/completions": (
    {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
    "messages tools tool_choice max_tokens max_completion_tokens top_logprobs logprobs "
    "chat_template_kwargs documents add_generation_prompt response_format n stop",
  ),
  "/inference/v1/generate": (
    {"token_ids": [60], "sampling_params": {"max_tokens": 4}},
    "token_ids sampling_params priority output_mode return_token_ids stream cache_salt",
  ),
  "/tokenize": ({}, "prompt messages tools add_special_tokens return_token_strs"),
  "/detokenize": ({}, "tokens model"),
  "/v1/load_lora_adapter": ({"lora_name": "a"}, "lora_name lora_path"),
  "/update_weights": ({}, "path mode version"),
}


@pytest.mark.parametrize("path", FIELDS)
def test_no_value_of_a_field_is_a_server_error(path, tmp_path):
  """Every field takes every value: the answer is 200 or says what is wrong."""
  base, names = FIELDS[path]
  with server(checkpoint_root=tmp_path, parts={"load_model": open}) as made:

    async def run():
      counts = {}
      async with made.client() as client:
        for name in names.split():
          for value in NASTY:
            answer = await client.post(path, json={**base, name: value})
            code = answer.status_code
            assert code == 200 or 400 <= code < 500, (name, value, answer.text)
            assert code == 200 or answer.json()["error"]["message"]
            counts[code] = counts.get(code, 0) + 1
      return counts

    counts = asyncio.run(run())
    assert counts[400] > 10
    assert made.get("/health").status_code == 200
