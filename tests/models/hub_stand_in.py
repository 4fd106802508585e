"""A stand-in of the hub's HTTP API on this machine: models with commits, tags and
branches; downloads, and uploads by LFS (not by Xet)."""

import base64
import contextlib
import dataclasses
import hashlib
import http.server
import json
import re
import threading

import pytest

TOKEN = "hf_a_token"
_WRITE = ("POST", "PUT")


@dataclasses.dataclass
class Model:
  """A model of the stand-in.

  Attributes:
    commits: commit -> name of a file -> its bytes.
    refs: branch or tag -> commit.
    gated, private: whether it takes a token to see it.
  """

  commits: dict[str, dict[str, bytes]] = dataclasses.field(default_factory=dict)
  refs: dict[str, str] = dataclasses.field(default_factory=dict)
  gated: bool = False
  private: bool = False

  def commit(self, files, *refs):
    """A further commit, which `main` and `refs` name; returns it."""
    sha = hashlib.sha1(f"{len(self.commits)}".encode()).hexdigest()
    self.commits[sha] = dict(files)
    self.refs |= dict.fromkeys(("main", *refs), sha)
    return sha


class Hub(http.server.ThreadingHTTPServer):
  """The server.

  Attributes:
    models: by id.
    blobs: uploaded by LFS, by SHA-256.
  """

  daemon_threads = True

  def __init__(self):
    super().__init__(("127.0.0.1", 0), _Handler)
    self.models: dict[str, Model] = {}
    self.blobs: dict[str, bytes] = {}
    self.address = f"http://127.0.0.1:{self.server_port}"

  def close(self):
    self.shutdown()
    self.server_close()


class _Refused(Exception):
  """(status, X-Error-Code)."""


class _Handler(http.server.BaseHTTPRequestHandler):
  server: Hub

  def log_message(self, *_):
    pass

  def handle_one(self):
    size = int(self.headers.get("Content-Length") or 0)
    self.body = self.rfile.read(size) if size else self._chunks()
    path = self.path.partition("?")[0]
    try:
      if self.command in _WRITE and "/blobs/" not in path and not self._is_known():
        raise _Refused(401, "")
      for pattern, serve in _ROUTES:
        if found := re.fullmatch(pattern, path):
          return serve(self, *found.groups())
      raise _Refused(404, "")
    except _Refused as error:
      code, name = error.args
      return self.answer({"error": name}, code=code, headers={"X-Error-Code": name})

  do_GET = do_HEAD = do_POST = do_PUT = handle_one

  def _chunks(self):
    """The body of a request that is sent in pieces."""
    body = b""
    if self.headers.get("Transfer-Encoding") == "chunked":
      while size := int(self.rfile.readline(), 16):
        body += self.rfile.read(size)
        self.rfile.readline()
      self.rfile.readline()
    return body

  def _is_known(self):
    return self.headers.get("Authorization") == f"Bearer {TOKEN}"

  def answer(self, value, code=200, headers=()):
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    self.send_response(code)
    sizes = {"Content-Length": str(len(body)), "Content-Type": "application/json"}
    for name, text in (sizes | dict(headers)).items():
      self.send_header(name, text)
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(body)

  def _model(self, name):
    model = self.server.models.get(name)
    if model is None or (model.private and not self._is_known()):
      raise _Refused(404, "RepoNotFound")
    if model.gated and not self._is_known():
      raise _Refused(403, "GatedRepo")
    return model

  def _at(self, name, revision):
    """(commit, files) of a revision."""
    model = self._model(name)
    sha = model.refs.get(revision, revision)
    if sha not in model.commits:
      raise _Refused(404, "RevisionNotFound")
    return sha, model.commits[sha]

  def info(self, name, revision="main"):
    sha, files = self._at(name, revision)
    info = {"id": name, "modelId": name, "sha": sha}
    info["private"] = self.server.models[name].private
    self.answer(info | {"siblings": [{"rfilename": file} for file in files]})

  def tree(self, name, revision):
    _, files = self._at(name, revision)
    self.answer(
      [
        {
          "type": "file",
          "path": file,
          "size": len(text),
          "oid": hashlib.sha1(text).hexdigest(),
        }
        for file, text in files.items()
      ]
    )

  def file(self, name, revision, file):
    sha, files = self._at(name, revision)
    if file not in files:
      raise _Refused(404, "EntryNotFound")
    tag = hashlib.sha256(files[file]).hexdigest()
    self.answer(files[file], headers={"ETag": f'"{tag}"', "X-Repo-Commit": sha})

  def create(self):
    asked = json.loads(self.body)
    name = f"{asked['organization']}/{asked['name']}"
    if asked["organization"] != "ORG":
      raise _Refused(403, "")
    url = f"{self.server.address}/{name}"
    if name in self.server.models:
      return self.answer({"url": url}, code=409)
    model = Model(private=asked.get("visibility") == "private")
    model.commit({})
    self.server.models[name] = model
    self.answer({"url": url})

  def valid(self):
    self.answer({"errors": [], "warnings": []})

  def preupload(self, name, revision):
    self._at(name, revision)
    files = json.loads(self.body)["files"]
    for file in files:
      is_large = file["path"].endswith(".safetensors")
      file["uploadMode"] = "lfs" if is_large else "regular"
      file["shouldIgnore"] = False
    self.answer({"files": files})

  def batch(self, name):
    self._model(name)
    objects = json.loads(self.body)["objects"]
    for each in objects:
      upload = {"href": f"{self.server.address}/blobs/{each['oid']}"}
      each["actions"] = {"upload": upload}
    self.answer({"transfer": "basic", "objects": objects})

  def put(self, oid):
    assert hashlib.sha256(self.body).hexdigest() == oid
    self.server.blobs[oid] = self.body
    self.answer({})

  def write(self, name, revision):
    _, before = self._at(name, revision)
    files = dict(before)
    for line in self.body.splitlines():
      entry = json.loads(line)
      value = entry["value"]
      if entry["key"] == "file":
        files[value["path"]] = base64.b64decode(value["content"])
      elif entry["key"] == "lfsFile":
        files[value["path"]] = self.server.blobs[value["oid"]]
    sha = self.server.models[name].commit(files)
    url = f"{self.server.address}/{name}/commit/{sha}"
    self.answer({"success": True, "commitOid": sha, "commitUrl": url})


_ID, _REST = r"([\w-]+/[\w-]+)", r"([^/]+)"
_ROUTES = [
  (rf"/api/models/{_ID}", _Handler.info),
  (rf"/api/models/{_ID}/revision/{_REST}", _Handler.info),
  (rf"/api/models/{_ID}/tree/{_REST}", _Handler.tree),
  (rf"/{_ID}/resolve/{_REST}/(.+)", _Handler.file),
  (r"/api/repos/create", _Handler.create),
  (r"/api/validate-yaml", _Handler.valid),
  (rf"/api/models/{_ID}/preupload/{_REST}", _Handler.preupload),
  (rf"/{_ID}\.git/info/lfs/objects/batch", _Handler.batch),
  (r"/blobs/(\w+)", _Handler.put),
  (rf"/api/models/{_ID}/commit/{_REST}", _Handler.write),
]


@contextlib.contextmanager
def serve(cache):
  """The stand-in in place of the hub, with a cache of its own and nobody logged in."""
  constants = pytest.importorskip("huggingface_hub.constants")
  server = Hub()
  # Looks every 10 ms whether it is to end, not every half second.
  threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
  with pytest.MonkeyPatch.context() as patch:
    # What HF_ENDPOINT and HF_HOME set when the package is imported.
    patch.setattr(constants, "ENDPOINT", server.address)
    template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    patch.setattr(constants, "HF_HUB_CACHE", str(cache / "cache"))
    patch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.delenv("HF_TOKEN", raising=False)
    yield server
  server.close()
