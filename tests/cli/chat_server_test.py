"""`tunix chat --url` against a server on a real socket, with a fake engine."""

import http.server
import io
import json
import threading

import pytest

from tests.cli import runs
from tests.serve.fake_engine import FakeEngine
from tests.serve.server_test import listening
from tunix.generate.external.http import Client

TEXT = "<think>so</think>The sea is wide."


class Terminal(io.StringIO):
  def isatty(self):
    return True


def chat(monkeypatch, url, said, *words, stdin=io.StringIO):
  monkeypatch.setattr("sys.stdin", stdin(said))
  return runs.tunix("chat", "--url", url, *words)


def prompts(engine):
  return [engine.tokenizer.decode(request.prompt) for request in engine.submitted]


def test_a_conversation_with_a_server(monkeypatch, capsys):
  engine = FakeEngine(text=TEXT)
  engine.loaded["short"] = None
  with listening(engine, model_name="tiny") as (address, _, _):
    said = "The river\nruns\n/reset\nslowly\n/exit\nnever\n"
    words = ["--system", "Be brief.", "--max_new_tokens", 90, "--temperature", 0.5]
    words += ["--seed", 7, "--top_k", 3, "--top_p", 0.9, "--stop", "wide"]
    assert chat(monkeypatch, address, said, *words) == 0
    reply = "<think>so</think>\nThe sea is \n"
    assert capsys.readouterr().out == reply * 3
    first, second, third = prompts(engine)
    assert "The river" in first and "Be brief." in first
    assert "The river" in second and "The sea is" in second and "runs" in second
    assert "so</think>" not in second.partition("runs")[0]
    assert "slowly" in third and "The river" not in third
    request = engine.submitted[0]
    assert request.max_tokens == 90 and request.temperature == 0.5
    assert (request.seed, request.top_k, request.top_p) == (7, 3, 0.9)
    assert list(request.stop_strings) == ["wide"] and request.adapter is None
    # The path of the API may be part of the address; adapters are models.
    said = "The river\n"
    assert chat(monkeypatch, f"{address}/v1/", said, "--model", "short") == 0
    assert engine.submitted[-1].adapter == "short"


def test_the_key_is_sent_and_never_shown(monkeypatch, capsys):
  engine = FakeEngine(text="Yes.")
  with listening(engine, api_key="s3cret") as (address, _, _):
    assert chat(monkeypatch, address, "Hello\n") == 2
    assert "--api_key_env" in capsys.readouterr().err
    words = ("--api_key_env", "MY_KEY")
    for value, problem in (
      ("", "is not set"),
      ("s3cret\x7f", "no header can carry"),
      ("wr0ng", "missing or wrong"),
    ):
      monkeypatch.setenv("MY_KEY", value)
      assert chat(monkeypatch, address, "Hello\n", *words) == 2
      error = capsys.readouterr().err
      assert problem in error and "s3cret" not in error and "wr0ng" not in error
    monkeypatch.setenv("MY_KEY", "s3cret\n")
    assert chat(monkeypatch, address, "Hello\n", *words) == 0
    assert capsys.readouterr().out == "Yes.\n"


def test_a_refused_turn_is_forgotten(monkeypatch, capsys):
  engine = FakeEngine(text="Yes.")
  with listening(engine) as (address, _, _):
    assert chat(monkeypatch, address, "sea " * 300 + "\nHello\n") == 0
    output = capsys.readouterr()
    assert "tokens" in output.err and output.out == "Yes.\n"
    assert "sea sea" not in prompts(engine)[0]
    assert chat(monkeypatch, address, "Hello\n", "--model", "none") == 2
    assert "'none'" in capsys.readouterr().err


def test_a_server_that_fails_ends_a_script_and_not_a_person(monkeypatch, capsys):
  engine = FakeEngine(text="Yes, it is.", rounds=1)
  with listening(engine) as (address, _, _):
    engine.failing = "the logits are not finite"
    assert chat(monkeypatch, address, "Hello\nHello\n") == 1
    assert capsys.readouterr().err.count("the logits are not finite") == 1
    assert chat(monkeypatch, address, "Hello\nHello\n", stdin=Terminal) == 0
    shown = capsys.readouterr().err
    assert shown.count("the logits are not finite") == 2
    assert f"talking to default at {address}" in shown
  assert chat(monkeypatch, address, "Hello\n") == 1
  assert f"{address} gives no answer" in capsys.readouterr().err


def test_ctrl_c_ends_the_request_and_keeps_its_text(monkeypatch, capsys):
  engine = FakeEngine(text="The sea is wide.", rounds=1)
  whole = Client.events

  def interrupted(self, path, body):
    for number, event in enumerate(whole(self, path, body)):
      if len(body["messages"]) == 1 and number == 3:
        raise KeyboardInterrupt
      yield event

  monkeypatch.setattr(Client, "events", interrupted)
  with listening(engine) as (address, _, _):
    assert chat(monkeypatch, address, "Hello\nAgain\n") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert second == "The sea is wide." and second.startswith(first) and first
    assert first in prompts(engine)[1].partition("Again")[0]


class Scripted(http.server.BaseHTTPRequestHandler):
  """A foreign server: answers every request with the same bytes."""

  answer = b""

  def do_GET(self):
    self.send_response(200)
    self.end_headers()
    self.wfile.write(self.answer)

  def do_POST(self):
    self.rfile.read(int(self.headers["Content-Length"]))
    self.do_GET()

  def log_message(self, *_):
    pass


@pytest.mark.parametrize(
  ("answer", "words", "message"),
  [
    (b"", ["--model", "m"], "ended before its answer was complete"),
    (b"data: {}\n\n", ["--model", "m"], "expected an event of a chat completion"),
    (b"data: {\n\n", ["--model", "m"], "is not JSON"),
    (b'data: {"error": {"message": "full"}}\n\n', ["--model", "m"], "failed: full"),
    (b"<html>", [], "is not JSON"),
    (b'{"data": []}', [], "lists no model"),
  ],
)
def test_foreign_servers(monkeypatch, capsys, answer, words, message):
  handler = type("Handler", (Scripted,), {"answer": answer})
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    assert chat(monkeypatch, url, "Hello\n", *words) == 1
    server.shutdown()
    thread.join(10)
  assert message in capsys.readouterr().err


def test_events_without_text_are_skipped(monkeypatch, capsys):
  delta = lambda **x: json.dumps({"choices": [{"delta": x}]})
  events = [delta(role="assistant"), delta(content=None), delta(content="a\x1b[2J")]
  events += [json.dumps({"choices": [], "usage": {}}), "[DONE]"]
  monkeypatch.setattr(
    Scripted,
    "answer",
    b": hi\n\n" + "".join(f"data:{x}\n\n" for x in events).encode(),
  )
  monkeypatch.setattr("sys.stdout.isatty", lambda: True)
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as server:
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    assert chat(monkeypatch, url, "Hello\n", "--model", "m") == 0
    server.shutdown()
  assert capsys.readouterr().out == "a\\x1b[2J\n"


@pytest.mark.parametrize(
  ("words", "message"),
  [
    ([], "--model is missing"),
    (["--model", "m", "--api_key_env", "A"], "needs --url"),
    (["--url", "http://a", "--adapter", "f"], "--adapter and --url exclude"),
    (["--url", "ftp://a"], "expected an address"),
  ],
)
def test_options_that_exclude_each_other(capsys, words, message):
  assert runs.tunix("chat", *words) == 2
  assert message in capsys.readouterr().err
