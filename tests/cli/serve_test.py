"""`tunix serve` as a process: answers, administration, a drain, a kill under load."""

import contextlib
import io
import math
import signal
import socket
import subprocess
import sys
import threading
import types

import httpx
import pytest

from tests import forks, toys, toys_text
from tests.cli import runs
from tests.generate.engine import mtp_test
from tunix.cli.commands import serve
from tunix.cli.commands.planning import serve as plan_serve
from tunix.cli.make import model_folders
from tunix.cli.run import folder as run_folder
from tunix.generate.engine.engine import Engine
from tunix.models import lora, safetensors_saver
from tunix.models.adapters import lora_modules
from tunix.serve.settings import ServeSettings
from tunix.utils import env

SOON = 120  # seconds; compilation on a busy machine is the longest part
PLAIN = {"ignore_eos": True, "temperature": 0}
MESSAGES = [{"role": "user", "content": "Hello"}]


def write_model(folder, seed=0):
  tokenizer = toys_text.chat_tokenizer("chatml")
  model = toys.model(seed, vocab_size=tokenizer.vocab_size, max_position=2048)
  safetensors_saver.save_pretrained(model, folder)
  tokenizer.save(folder)
  return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return write_model(tmp_path_factory.mktemp("serve") / "tiny")


class Server:
  """A server process, or a fork (tests/forks.py); `url` once it is ready."""

  def __init__(self, folder, *words, fork=True):
    command = [sys.executable, "-m", "tunix.cli.main", "serve", str(folder)]
    # Unbuffered output would hide a line that is not flushed.
    changes = {"TUNIX_API_KEY": "secret", "JAX_PLATFORMS": "cpu"}
    popen = forks.popen if fork else subprocess.Popen
    self.process = popen(
      [*command, "--port", "0", "--slots", "2", *map(str, words)],
      stdout=subprocess.PIPE,
      text=True,
      env=env.inherited(changes | {"PYTHONUNBUFFERED": ""}),
    )
    self.url = self._url()
    self.headers = {"Authorization": "Bearer secret"}

  def _url(self):
    late = threading.Timer(SOON, self.process.kill)  # a pipe has no time limit
    late.start()
    try:
      for line in self.process.stdout:
        if " at http" in line:
          return line.split(" at ")[1].strip()
    finally:
      late.cancel()
    raise AssertionError(f"the server ended with {self.process.wait(SOON)}")

  def post(self, path, /, **body):
    return httpx.post(
      f"{self.url}{path}", json=body, headers=self.headers, timeout=SOON
    )

  def ask(self, tokens, **more):
    body = {"model": "tiny", "prompt": "the sea", "max_tokens": tokens, **more}
    return self.post("/v1/completions", **body)

  def choices(self, **more):
    return self.ask(5, **PLAIN, **more).json()["choices"]


@contextlib.contextmanager
def serving(folder, *words, fork=True):
  server = Server(folder, *words, fork=fork)
  try:
    yield server
  finally:
    server.process.kill()
    server.process.wait(SOON)
    server.process.stdout.close()


def streamed(url):
  """A reply as the openai package streams it."""
  openai = pytest.importorskip("openai")
  options = {"base_url": f"{url}/v1", "api_key": "secret", "max_retries": 0}
  with openai.OpenAI(**options) as client:
    stream = client.chat.completions.create(
      model="tiny", messages=MESSAGES, max_tokens=40, temperature=0, stream=True
    )
    chunks = list(stream)
  assert chunks[-1].choices[0].finish_reason in ("stop", "length")
  return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@pytest.mark.slow
@pytest.mark.ci
def test_a_server_answers_starts_again_after_a_kill_and_drains(
  folder, monkeypatch, capsys
):
  with serving(folder) as first:
    assert httpx.get(f"{first.url}/v1/models", timeout=SOON).status_code == 401
    assert "tunix" in httpx.get(first.url, timeout=SOON).text  # the page
    assert first.ask(5, **PLAIN).json()["usage"]["completion_tokens"] == 5
    choices = first.choices()
    reply = streamed(first.url)
    # Both ways to chat give the same tokens.
    monkeypatch.setenv("KEY", "secret")
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    words = ["--api_key_env", "KEY", "--max_new_tokens", 40]
    assert runs.tunix("chat", "--url", first.url, *words) == 0
    assert capsys.readouterr().out == f"{reply}\n"
    threading.Timer(0.5, first.process.kill).start()
    with pytest.raises(httpx.TransportError):
      while True:  # under load
        first.ask(1900, ignore_eos=True, n=2)
  with serving(folder) as second:
    assert second.choices() == choices
    body = {"prompt": "the sea", "max_tokens": 1900, "stream": True, **PLAIN}
    body["stream_options"] = {"include_usage": True}
    url = f"{second.url}/v1/completions"
    options = {"json": body, "headers": second.headers, "timeout": SOON}
    with httpx.stream("POST", url, **options) as answer:
      lines = (line for line in answer.iter_lines() if line)
      next(lines)
      second.process.send_signal(signal.SIGTERM)
      *_, usage, end = lines
    assert end == "data: [DONE]" and '"completion_tokens":1900' in usage
    assert second.process.wait(SOON) == 0


@pytest.mark.slow
@pytest.mark.ci
def test_adapters_pauses_and_new_weights(folder, tmp_path):
  tokenizer = toys_text.chat_tokenizer("chatml")
  sizes = {"vocab_size": tokenizer.vocab_size, "max_position": 2048}
  lora.save_adapter(toys.model(lora_rank=2, **sizes), tmp_path / "first")
  lora.save_adapter(toys.model(lora_rank=4, **sizes), tmp_path / "second")
  write_model(tmp_path / "new", seed=1)
  words = ["--adapter", f"short={tmp_path / 'first'}", "--checkpoint_root", tmp_path]
  with serving(folder, *words, "--adapter_ranks", 8) as server:
    plain, short = server.choices(), server.choices(model="short")
    assert plain != short

    load = {"lora_name": "long", "lora_path": "second"}
    assert server.post("/v1/load_lora_adapter", **load).status_code == 200
    assert server.choices(model="long") not in (plain, short)
    assert server.post("/v1/unload_lora_adapter", lora_name="long").status_code == 200
    assert server.choices(model="short") == short

    assert server.post("/pause", mode="keep").status_code == 200
    assert httpx.get(f"{server.url}/ready", timeout=SOON).status_code == 503
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(server.choices()))
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive() and not answers
    assert server.post("/resume").status_code == 200
    waiting.join(SOON)
    assert answers == [plain]
    assert httpx.get(f"{server.url}/ready", timeout=SOON).status_code == 200

    assert server.post("/update_weights", path="new").json()["version"] == 1
    assert server.choices() != plain
    assert server.post("/update_weights", path="../tiny").status_code == 403


@pytest.mark.parametrize(
  ("words", "code", "message"),
  [
    (["--host", "0.0.0.0"], 2, r"set an API key"),
    (["--adapter", "here"], 2, "expected NAME=FOLDER"),
    (["--adapter", "a=."] * 2, 2, "'a' is the name of the model or of another"),
    (["--adapter", "tiny=."], 2, "'tiny' is the name of the model or of another"),
    (["--adapter", "a=/nowhere"], 2, "there is no such folder"),
    (["--api_key_file", "/nowhere"], 2, "/nowhere"),
    (["--slots", "0"], 2, "slots is 0"),
    (["--draft_tokens", "-1"], 2, "draft_tokens is -1"),
    (["--replicas", "5", "--tp", "2"], 2, "5 replicas of 2 devices need 10 devices"),
    (["--tp", "0"], 2, "--tp is 0"),
    (["--tinker_root", "x"], 2, "--tinker_root has no effect without --tinker"),
    (["--proxy", "example.org"], 2, "--proxy has 'example.org'"),
  ],
)
def test_bad_arguments(folder, monkeypatch, capsys, words, code, message):
  monkeypatch.delenv("TUNIX_API_KEY", raising=False)
  # They are refused before anything is loaded.
  monkeypatch.setattr(model_folders, "load_model", None)
  monkeypatch.setattr(model_folders, "load_tokenizer", None)
  assert runs.tunix("serve", folder, *words) == code
  error = capsys.readouterr().err
  assert message in error and error.count("\n") == 1


def test_an_address_in_use_is_found_before_the_model_is_read(
  folder, monkeypatch, capsys
):
  monkeypatch.setattr(run_folder, "export_of", None)
  with socket.create_server(("127.0.0.1", 0)) as other:
    port = other.getsockname()[1]
    assert runs.tunix("serve", folder, "--port", port) == 1
  assert f"cannot listen on 127.0.0.1, port {port}" in capsys.readouterr().err


def test_programs_are_kept_in_a_folder_of_this_user(folder, tmp_path, capsys):
  tmp_path.chmod(0o777)
  assert runs.tunix("serve", folder, "--compilation_cache", tmp_path) == 2
  assert "which can be written by every user" in capsys.readouterr().err
  (key := tmp_path / "key").write_bytes(bytes(range(32)))
  tmp_path.chmod(0o700)
  key.chmod(0o600)
  (programs := tmp_path / "programs").mkdir(mode=0o700)
  words = "--compilation_cache", programs, "--compilation_cache_key", key
  assert runs.tunix("serve", folder, *words) == 2
  assert "which has no signed" in capsys.readouterr().err
  assert runs.tunix("serve", folder, *words[2:]) == 2
  assert "compilation_cache is not set" in capsys.readouterr().err
  for file in (key, key / "programs"):
    assert runs.tunix("serve", folder, "--compilation_cache", file) == 2
    assert f"compilation_cache is '{file}', which is a file" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["starlette", "uvicorn", "prometheus_client"])
def test_the_extra_is_named(folder, monkeypatch, capsys, package):
  monkeypatch.setitem(sys.modules, package, None)
  assert runs.tunix("serve", folder) == 2
  assert "pip install tunix[serve]" in capsys.readouterr().err


def test_the_default_length_is_what_the_model_has(folder, monkeypatch):
  model = types.SimpleNamespace(config=types.SimpleNamespace(max_position=300))

  def most(*words):
    values = serve.parser().read([str(folder), *words])
    return serve.engine_config(values, model).max_tokens

  assert most() == 300
  assert most("--max_tokens", "200") == 200
  with pytest.raises(ValueError, match="--max_tokens is 301, but the model has 300"):
    most("--max_tokens", "301")
  model.config.max_position = None
  assert most() == 2048


def test_the_name_is_that_of_the_folder(folder, monkeypatch):
  monkeypatch.chdir(folder)
  name = lambda model: serve.parser().read([model]).build(serve.ServeOptions).name
  assert name(".") == name(str(folder)) == "tiny"
  assert name("ORG/NAME") == "NAME"


def test_proxies_reach_the_server():
  words = ["a", "--proxy", "10.0.0.9", "--proxy", "10.1.0.0/16"]
  read = lambda words: serve.parser().read(words).build(ServeSettings)
  proxies = lambda words: read(words).proxies
  assert proxies(words) == ("10.0.0.9", "10.1.0.0/16") and proxies(["a"]) == ()


@pytest.mark.parametrize(
  "words", [(), ("--replicas", 2, "--all_widths"), ("--draft_tokens", 2)]
)
def test_options_reach_each_engine(folder, monkeypatch, words):
  served, wide = [], []
  monkeypatch.delenv("TUNIX_API_KEY", raising=False)
  warm_up = lambda self, all_widths, **_: wide.append(all_widths)
  monkeypatch.setattr(Engine, "warm_up", warm_up)
  take = lambda driver, *_, **__: served.append(driver)
  monkeypatch.setattr(serve.server, "serve", take)
  assert not runs.tunix("serve", folder, "--draft_model", folder, *words)
  [driver] = served
  drivers = driver.drivers if "--replicas" in words else [driver]
  for one in drivers:
    assert one.engine._drafts.sources == ("none", "lookup", "model")
    assert one.engine.config.draft_tokens == (2 if "--draft_tokens" in words else 4)
  assert len(drivers) == (2 if "--replicas" in words else 1)
  assert wide == ["--all_widths" in words] * len(drivers)


def test_the_layer_for_further_tokens_reaches_the_engine(tmp_path, monkeypatch):
  mtp_test.made("glm4_moe_lite", tmp_path)
  folder, served = tmp_path / "glm4_moe_lite", []
  toys_text.chat_tokenizer("chatml").save(folder)
  monkeypatch.setattr(Engine, "warm_up", lambda self, **_: None)
  take = lambda driver, *_, **__: served.append(driver)
  monkeypatch.setattr(serve.server, "serve", take)
  assert not runs.tunix("serve", folder, "--draft_model", "mtp")
  [driver] = served
  assert driver.engine._drafts.sources == ("model",)
  assert driver.engine.config.draft_tokens == 1


def test_kernels_in_eight_bits_reach_the_engine_and_the_plan(folder, monkeypatch):
  served = []
  monkeypatch.delenv("TUNIX_API_KEY", raising=False)
  monkeypatch.setattr(Engine, "warm_up", lambda self, **_: None)
  take = lambda driver, *_, **__: served.append(driver)
  monkeypatch.setattr(serve.server, "serve", take)
  assert not runs.tunix("serve", folder, "--weights", "fp8")
  kernels = lora_modules.adaptable(served[0].engine._model).values()
  assert {x.kernel.method for x in kernels} == {"fp8"}
  planned = {}
  for form in (), ("--weights", "fp8"):
    values = plan_serve.parser().read([str(folder), "--slots=2", *form])
    planned[form] = plan_serve._plan(values, "cpu:1", {"tp": 1})
  whole, rounded = (x.engine.weights_bytes for x in planned.values())
  size = sum(math.prod(x.kernel.shape) for x in kernels)
  assert 0.9 * 3 * size < whole - rounded < 3 * size  # float32 to 8 bits, and scales
  assert planned["--weights", "fp8"].model.endswith("stored as fp8")
  with pytest.raises(ValueError, match="--tinker with --weights int8: the training"):
    words = [str(folder), "--tinker", "--weights", "int8"]
    serve._tinker_settings(serve.parser().read(words))


def test_a_plan_refuses_a_draft_model():
  words = ["here", "--draft_model", "there", "--topology", "cpu:2"]
  with pytest.raises(ValueError, match="--draft_model is 'there', but a plan has one"):
    plan_serve.main(words)


@pytest.mark.slow
def test_replicas_answer_and_take_new_weights(folder, tmp_path):
  write_model(tmp_path / "new", seed=1)
  words = ("--replicas", 2, "--tp", 2, "--checkpoint_root", tmp_path)
  with serving(folder, *words) as server:
    before = server.choices()
    assert server.choices() == before
    answer = server.post("/update_weights", path="new")
    assert answer.status_code == 200 and answer.json()["version"] == 1
    assert server.choices() != before
    ready = httpx.get(f"{server.url}/ready").json()
    assert ready == {"status": "ok"}
