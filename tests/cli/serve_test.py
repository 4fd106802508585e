"""`tunix serve` as a process: answers, a drain, and a kill under load."""

import signal
import subprocess
import sys
import threading

import httpx
import pytest

from tests import toys, toys_text
from tunix.cli.commands import serve
from tunix.models import safetensors_saver
from tunix.utils import env

SOON = 120  # seconds; compilation on a busy machine is the longest part


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  made = tmp_path_factory.mktemp("serve") / "tiny"
  tokenizer = toys_text.chat_tokenizer("chatml")
  model = toys.model(vocab_size=tokenizer.vocab_size, max_position=4096)
  safetensors_saver.save_pretrained(model, made)
  tokenizer.save(made)
  return made


class Server:
  """A server process; `url` once it is ready."""

  def __init__(self, folder, *words):
    command = [sys.executable, "-m", "tunix.cli.main", "serve", str(folder)]
    sizes = ["--port", "0", "--slots", "2", "--max_tokens", "2048"]
    self.process = subprocess.Popen(
      [*command, *sizes, *words],
      stdout=subprocess.PIPE,
      text=True,
      env=env.inherited({"TUNIX_API_KEY": "secret", "JAX_PLATFORMS": "cpu"}),
    )
    self.url = self._url()
    self.headers = {"Authorization": "Bearer secret"}

  def _url(self):
    for line in self.process.stdout:
      if " at http" in line:
        return line.split(" at ")[1].strip()
    raise AssertionError(f"the server ended with {self.process.wait(SOON)}")

  def ask(self, tokens, **more):
    body = {"model": "tiny", "prompt": "the sea", "max_tokens": tokens, **more}
    return httpx.post(
      f"{self.url}/v1/completions", json=body, headers=self.headers, timeout=SOON
    )


@pytest.mark.slow
@pytest.mark.ci
def test_a_server_answers_drains_and_starts_again_after_a_kill(folder):
  first = Server(folder)
  assert httpx.get(f"{first.url}/v1/models", timeout=SOON).status_code == 401
  plain = {"ignore_eos": True, "temperature": 0}
  answer = first.ask(5, **plain).json()
  assert answer["usage"]["completion_tokens"] == 5
  with pytest.raises(httpx.TransportError):
    threading.Timer(0.5, first.process.kill).start()
    while True:  # under load
      first.ask(1900, ignore_eos=True, n=2)
  second = Server(folder)
  assert second.ask(5, **plain).json()["choices"] == answer["choices"]
  second.process.send_signal(signal.SIGTERM)
  assert second.process.wait(SOON) == 0


def test_an_open_address_needs_a_key(folder, monkeypatch):
  monkeypatch.delenv("TUNIX_API_KEY", raising=False)
  with pytest.raises(ValueError, match=r"host is '0\.0\.0\.0'.* set an API key"):
    serve.main([str(folder), "--host", "0.0.0.0"])


def test_an_adapter_needs_a_name(folder):
  with pytest.raises(ValueError, match="expected NAME=FOLDER"):
    serve.main([str(folder), "--adapter", "here"])
