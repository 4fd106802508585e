"""Models of the hub in the command, from the stand-in of its HTTP API."""

import json
import pathlib

import pytest

from tests.cli import runs
from tests.models import hub_stand_in
from tests.models.hub_stand_in import Model
from tunix.cli import config as config_lib
from tunix.cli.commands import export as export_main
from tunix.cli.make import export as build_export, loading
from tunix.cli.run import folder as run_folder
from tunix.cli.run.folder import RunFolder
from tunix.cli.run.settle import settle


@pytest.fixture
def hub(tmp_path, model):
  files = {file.name: file.read_bytes() for file in model.iterdir()}
  with hub_stand_in.serve(tmp_path) as server:
    server.models["ORG/tiny"] = Model()
    server.models["ORG/tiny"].commit(files, "v1")
    yield server


def test_a_run_keeps_the_commit_that_it_began_with(hub, settings, tmp_path):
  settings |= {"model__path": "ORG/tiny", "lora__rank": 2}
  folder = RunFolder(tmp_path / "out")

  def prepared(**more):
    config = config_lib.load(runs.arguments(**settings, **more))
    return settle(config)

  tiny = hub.models["ORG/tiny"]
  first = tiny.refs["v1"]
  config, _, data = prepared(model__revision="v1")
  assert config.model.revision == first
  folder.start(config, data.fingerprints, data.scans)
  (folder.checkpoints / "4").mkdir(parents=True)
  folder.write_result({"steps": 4})
  build_export.export(
    config, loading.ModelLoader(config, None).model(), "adapter", folder.export
  )
  written = json.loads((folder.export / "adapter_config.json").read_text())
  assert (written["base_model_name_or_path"], written["revision"]) == (
    "ORG/tiny",
    first,
  )

  # A further commit that changes no weight: the run is the same one.
  tiny.commit(tiny.commits[first] | {"README.md": b"Hello"})
  moved, _, data = prepared()
  assert moved.model.revision == tiny.refs["main"] != first
  folder.check_resume(moved, data.fingerprints)
  assert folder.result(moved) == {"steps": 4}
  base, _ = run_folder.export_of(str(folder.path), None)
  assert pathlib.Path(base).name == first

  weights = tiny.commits[first]["model.safetensors"]
  tiny.commit(tiny.commits[first] | {"model.safetensors": weights[:-1] + b"\x7f"})
  other, _, data = prepared()
  with pytest.raises(ValueError, match=r"model\.path"):
    folder.check_resume(other, data.fingerprints)


def test_an_export_is_uploaded(hub, settings, tmp_path, monkeypatch, capsys):
  config = config_lib.load(runs.arguments(**settings, lora__rank=2))
  run = RunFolder(tmp_path / "run")
  run.start(config, {}, {})
  (run.checkpoints / "4").mkdir(parents=True)
  loaded = []

  def restore(model, folder, step, *, lora_only):
    loaded.append(folder.path)  # fresh weights are as good here
    return 4

  monkeypatch.setattr(export_main, "restore", restore)
  words = ["export", "--run", run.path, "--to", tmp_path / "a", "--push-to-hub"]
  assert runs.tunix(*words, "ORG/new") == 2
  assert "HF_TOKEN" in capsys.readouterr().err
  monkeypatch.setenv("HF_TOKEN", hub_stand_in.TOKEN)
  assert runs.tunix(*words, "ELSE/new") == 2
  assert "ELSE" in capsys.readouterr().err
  assert not loaded and not (tmp_path / "a").exists() and len(hub.models) == 1
  assert runs.tunix(*words, "ORG/new", "--private") == 0
  made = hub.models["ORG/new"]
  assert made.private and made.refs["main"] in capsys.readouterr().out
  files = {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()}
  assert made.commits[made.refs["main"]] == files
  assert {"adapter_config.json", "tokenizer.json"} <= files.keys()


def test_a_revision_belongs_to_a_hub_id(hub, settings, capsys):
  words = runs.arguments(**settings)
  for more, says in (
    ([], "model.revision is 'v2'"),
    (["--model.path=ORG/tiny"], "'v2'"),
    (["--model.name=qwen3_0p6b", "--model.path=null"], "model.path"),
  ):
    assert runs.tunix("train", *words, "--model.revision=v2", *more) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
