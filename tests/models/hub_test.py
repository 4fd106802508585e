"""Models by hub id, from a stand-in of the hub's HTTP API on this machine."""

import json
import shutil

import pytest

from tests import toys_text
from tests.models import checkpoints, hub_stand_in
from tests.models.gguf import ggufs
from tests.models.hub_stand_in import Model
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import automodel, hub as hub_lib

SOURCE = checkpoints.GOLDEN / "qwen3"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  """Of a small model with its tokenizer."""
  folder = tmp_path_factory.mktemp("files")
  toys_text.chat_tokenizer("chatml").save(folder)
  places = [*SOURCE.iterdir(), *folder.iterdir()]
  return {file.name: file.read_bytes() for file in places if file.is_file()}


@pytest.fixture
def hub(tmp_path, files):
  with hub_stand_in.serve(tmp_path) as server:
    config = json.loads(files["config.json"])
    older = files | {"config.json": json.dumps(config | {"rms_norm_eps": 0.5}).encode()}
    server.models["ORG/open"] = Model()
    server.models["ORG/open"].commit(older, "v1")
    server.models["ORG/open"].commit(files)
    server.models["ORG/gated"] = Model(gated=True)
    server.models["ORG/gated"].commit(files)
    yield server


def test_a_hub_id_is_downloaded_once_and_then_read_offline(hub):
  folder = automodel.resolve_folder("ORG/open")
  for file in ("config.json", "model-00001-of-00003.safetensors"):
    assert (folder / file).read_bytes() == (SOURCE / file).read_bytes()
  assert not (folder / "expected.npz").exists()
  hub.close()
  assert automodel.resolve_folder("ORG/open") == folder


def test_second_copies_of_the_weights_stay_at_the_hub(hub, files):
  copies = ("consolidated.safetensors", "original/model.safetensors")
  hub.models["ORG/twice"] = Model()
  hub.models["ORG/twice"].commit(files | dict.fromkeys(copies, b"x"))
  folder = automodel.resolve_folder("ORG/twice")
  found = {str(path.relative_to(folder)) for path in folder.rglob("*.safetensors")}
  assert found == {name for name in files if name.endswith(".safetensors")}


def test_a_gated_model_names_the_way_in(hub, monkeypatch):
  with pytest.raises(FileNotFoundError, match="is gated: accept its terms on"):
    automodel.resolve_folder("ORG/gated")
  with pytest.raises(FileNotFoundError, match="no model 'ORG/none' at the hub that"):
    automodel.resolve_folder("ORG/none")
  monkeypatch.setenv("HF_TOKEN", hub_stand_in.TOKEN)
  assert (automodel.resolve_folder("ORG/gated") / "config.json").is_file()


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub):
  refs = hub.models["ORG/open"].refs
  bases = {}
  for revision in (None, "main", "v1", refs["v1"]):
    folder = automodel.resolve_folder("ORG/open", revision)
    assert hub_lib.commit_of(folder) == refs.get(revision or "main", revision)
    config = automodel.config_of_folder("ORG/open", revision)
    bases[revision] = config.norm_eps
  assert bases["v1"] == bases[refs["v1"]] == 0.5
  assert bases[None] == bases["main"] != 0.5
  with pytest.raises(
    FileNotFoundError, match="has no revision 'v2': give a commit, tag"
  ):
    automodel.resolve_folder("ORG/open", "v2")
  with pytest.raises(ValueError, match=r"revision is 'v1' and .* is a folder"):
    automodel.AutoModel.from_pretrained(SOURCE, revision="v1")
  model = automodel.AutoModel.from_pretrained("ORG/open", revision="v1")
  assert model.config.norm_eps == 0.5


def test_a_gguf_file_is_downloaded_alone(hub, tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  made = ggufs.write(tmp_path / "made", *ggufs.source("qwen3"))
  hub.models["ORG/files"] = Model()
  names = ("Q8_0/model.gguf", "other.gguf")
  commit = hub.models["ORG/files"].commit(dict.fromkeys(names, made.read_bytes()))
  folder = automodel.resolve_folder("ORG/files/Q8_0/model.gguf")
  assert (folder / "model.gguf").read_bytes() == made.read_bytes()
  assert hub_lib.commit_of(folder) == commit
  assert automodel.config_of_folder("ORG/files/Q8_0/model.gguf", commit).num_layers
  snapshot = (folder / "model.gguf").readlink().parents[1]
  assert [x.name for x in snapshot.rglob("*.gguf")] == ["model.gguf"]
  with pytest.raises(
    FileNotFoundError, match=r"'ORG/files' at the hub has no 'no\.gguf'"
  ):
    automodel.resolve_folder("ORG/files/no.gguf")


def test_a_folder_is_uploaded_and_read_back(hub, monkeypatch, tmp_path):
  folder = tmp_path / "mine"
  folder.mkdir()
  for name in ("config.json", "model-00001-of-00003.safetensors"):
    shutil.copy(SOURCE / name, folder)
  (folder / "README.md").write_text("# Mine\n")
  with pytest.raises(
    ValueError, match="'ORG/new' cannot be written without logging in"
  ):
    hub_lib.push(folder, "ORG/new")
  monkeypatch.setenv("HF_TOKEN", hub_stand_in.TOKEN)
  url = hub_lib.push(folder, "ORG/new", private=True, message="First")
  assert url.endswith(f"/ORG/new/commit/{hub.models['ORG/new'].refs['main']}")
  assert hub.models["ORG/new"].private
  assert len(hub.blobs) == 1  # the weights; small files go with the commit
  again = automodel.resolve_folder("ORG/new")
  for file in folder.iterdir():
    if file.suffix != ".md":
      assert (again / file.name).read_bytes() == file.read_bytes()
  hub_lib.push(folder, "ORG/new")
  for name, private, says in (
    ("ELSE/new", False, "'ELSE/new' cannot be written with this token"),
    ("ORG/open", True, "is at the hub already, and public: make it private"),
    ("new", False, "is no name of the hub: give 'owner/name'"),
  ):
    with pytest.raises(ValueError, match=says):
      hub_lib.push(folder, name, private=private)
  with pytest.raises(FileNotFoundError, match="there is no folder"):
    hub_lib.push(folder / "none", "ORG/new")
  hub.close()
  with pytest.raises(OSError, match=r"the hub cannot be reached \(.*check the network"):
    hub_lib.push(folder, "ORG/new")


def test_a_tokenizer_is_downloaded_without_weights(hub, files):
  tokenizer = TokenizerAdapter.from_pretrained("ORG/open", revision="v1")
  assert tokenizer.chat_template == toys_text.CHATML
  [folder] = (hub_lib.download("ORG/open", (), "v1"),)
  assert (folder / "tokenizer.json").read_bytes() == files["tokenizer.json"]
  assert not list(folder.glob("*.safetensors"))
  with pytest.raises(
    FileNotFoundError, match=r"no tokenizer at 'ORG/open': .* no revis"
  ):
    TokenizerAdapter.from_pretrained("ORG/open", revision="v2")
  with pytest.raises(FileNotFoundError, match="no tokenizer at 'ORG/none': neither"):
    TokenizerAdapter.from_pretrained("ORG/none")
  with pytest.raises(ValueError, match="is a folder: leave it out"):
    TokenizerAdapter.from_pretrained(folder, revision="v1")
