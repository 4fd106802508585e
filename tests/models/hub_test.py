"""Downloads by hub id, from a stand-in of the hub's HTTP API on this machine."""

import hashlib
import http.server
import json
import threading

import pytest

from tests.models import checkpoints
from tunix.models import automodel

SHA = "0" * 40
SOURCE = checkpoints.GOLDEN / "qwen3"
OPEN_TO = "Bearer hf_a_token"


class Hub(http.server.BaseHTTPRequestHandler):
  """One gated model, ORG/gated, and an open one with the same files, ORG/open."""

  def log_message(self, *_):
    pass

  def do_HEAD(self):
    self.do_GET()

  def do_GET(self):
    path = self.path.partition("?")[0]
    if "/gated" in path and self.headers.get("Authorization") != OPEN_TO:
      return self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
    if "/gated" not in path and "/open" not in path:
      return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
    if "/resolve/" in path:
      body = (SOURCE / path.rpartition("/")[2]).read_bytes()
      tag = hashlib.sha256(body).hexdigest()
      return self.answer(200, body, {"ETag": f'"{tag}"', "X-Repo-Commit": SHA})
    files = sorted(f for f in SOURCE.iterdir() if f.is_file())
    if "/tree/" in path:
      listed = [
        {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": SHA}
        for f in files
      ]
      return self.answer(200, json.dumps(listed).encode(), {})
    siblings = [{"rfilename": f.name} for f in files]
    info = {"id": "ORG/open", "modelId": "ORG/open", "sha": SHA, "siblings": siblings}
    return self.answer(200, json.dumps(info).encode(), {})

  def answer(self, code, body, headers):
    self.send_response(code)
    sizes = {"Content-Length": str(len(body)), "Content-Type": "application/json"}
    for name, value in (sizes | headers).items():
      self.send_header(name, value)
    self.end_headers()
    if self.command == "GET":
      self.wfile.write(body)


@pytest.fixture
def hub(tmp_path, monkeypatch):
  constants = pytest.importorskip("huggingface_hub.constants")
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  address = f"http://127.0.0.1:{server.server_port}"
  # What HF_ENDPOINT and HF_HOME set when the package is imported.
  monkeypatch.setattr(constants, "ENDPOINT", address)
  template = address + "/{repo_id}/resolve/{revision}/{filename}"
  monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
  monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
  monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
  monkeypatch.delenv("HF_TOKEN", raising=False)
  yield server
  server.shutdown()
  server.server_close()


def test_a_hub_id_is_downloaded_once_and_then_read_offline(hub):
  folder = automodel.resolve_folder("ORG/open")
  for file in ("config.json", "model-00001-of-00003.safetensors"):
    assert (folder / file).read_bytes() == (SOURCE / file).read_bytes()
  assert not (folder / "expected.npz").exists()
  hub.shutdown()
  hub.server_close()
  assert automodel.resolve_folder("ORG/open") == folder


def test_a_gated_model_names_the_way_in(hub, monkeypatch):
  with pytest.raises(FileNotFoundError, match="is gated: accept its terms on"):
    automodel.resolve_folder("ORG/gated")
  with pytest.raises(FileNotFoundError, match="no model 'ORG/none' at the hub that"):
    automodel.resolve_folder("ORG/none")
  monkeypatch.setenv("HF_TOKEN", OPEN_TO.removeprefix("Bearer "))
  assert (automodel.resolve_folder("ORG/gated") / "config.json").is_file()
