"""Mistakes of users: one line that names the key and the remedy, and no traceback."""

import json
import os
import pathlib
import shutil
import types

import pytest

from tests.cli import runs
from tunix.cli import main as cli


@pytest.fixture
def refused(settings, capsys):
  """Runs `tunix train` with changed keys; returns the line on standard error."""

  def run(**keys):
    code = runs.tunix("train", *runs.arguments(**(settings | keys)))
    error = capsys.readouterr().err
    assert code == 2, error
    assert error.startswith("tunix: error: ")
    assert error.count("\n") == 1
    assert "Traceback" not in error
    assert not pathlib.Path(settings["output_dir"]).exists()
    return error

  return run


def copy_model(model, folder, **changed):
  """A copy of the model folder with other fields in config.json."""
  shutil.copytree(model, folder)
  config = json.loads((folder / "config.json").read_text())
  (folder / "config.json").write_text(json.dumps(config | changed))
  return folder


def test_no_such_folder(refused):
  assert "/no/such/folder" in refused(model__path="/no/such/folder")


def test_unknown_family(refused, model, tmp_path):
  error = refused(model__path=copy_model(model, tmp_path / "m", model_type="mamba"))
  assert "'mamba'" in error


def test_corrupted_safetensors(refused, model, tmp_path):
  folder = copy_model(model, tmp_path / "m")
  weights = folder / "model.safetensors"
  weights.write_bytes(weights.read_bytes()[:-100])
  assert "damaged" in refused(model__path=folder)
  weights.write_bytes(b"\xff" * 1000)
  assert "damaged" in refused(model__path=folder)


def test_missing_tensor(refused, model, tmp_path):
  folder = copy_model(model, tmp_path / "m", num_hidden_layers=3)
  assert "model.layers.2." in refused(model__path=folder)


def test_no_such_data_file(refused):
  assert "/no/such.jsonl" in refused(data__train="/no/such.jsonl")


def test_empty_data_file(refused, tmp_path):
  (tmp_path / "empty.jsonl").write_text("\n")
  assert "empty.jsonl" in refused(data__train=tmp_path / "empty.jsonl")


@pytest.mark.parametrize(
  "line", ['{"prompt": "a"}', '{"question": "a"}', "{", '{"messages": []}']
)
def test_bad_records_name_their_line(refused, tmp_path, line):
  file = runs.write_records(tmp_path / "bad.jsonl", 3)
  file.write_text(file.read_text() + line + "\n")
  assert f"{file}:4: " in refused(data__train=file)
  assert f"{file}:4: " in refused(data__eval=file)


def test_a_prompt_longer_than_the_maximum_names_its_line(refused, tmp_path):
  file = runs.write_records(tmp_path / "long.jsonl", 3)
  record = {"prompt": "How many days? " * 40, "response": "seven"}
  file.write_text(file.read_text() + json.dumps(record) + "\n")
  error = refused(data__train=file)
  assert f"{file}:4: " in error
  assert "max_length" in error


def test_a_record_without_trained_text_names_its_line(refused, tmp_path):
  file = tmp_path / "silent.jsonl"
  file.write_text('{"messages": [{"role": "user", "content": "hello"}]}\n')
  assert f"{file}:1: " in refused(data__train=file)


TEMPLATE = "{% for m in messages %}{{ m.content + 1 }}<|im_end|>{% endfor %}"


def test_a_template_that_fails_names_the_record(refused, tmp_path, train_file):
  (tmp_path / "mine.jinja").write_text(TEMPLATE)
  error = refused(tokenizer__chat_template=tmp_path / "mine.jinja")
  assert f"{train_file}:1: " in error
  assert "line 1, TypeError" in error


def test_templates_that_are_no_text_are_named(refused, model, tmp_path):
  file = tmp_path / "mine.jinja"
  file.write_bytes(b"caf\xe9")
  error = refused(tokenizer__chat_template=file)
  assert "tokenizer.chat_template" in error and str(file) in error
  folder = copy_model(model, tmp_path / "m")
  (folder / "chat_template.jinja").write_bytes(b"caf\xe9")
  error = refused(model__path=folder)
  assert str(folder / "chat_template.jinja") in error


def test_reserved_names_of_the_template(refused):
  for name in ("now", "messages", "add_generation_prompt"):
    error = refused(**{f"data__template_args__{name}": 1})
    assert f"data.template_args.{name} " in error
  error = refused(data__template_args="{1: x}")
  assert "data.template_args is the mapping {1: 'x'}" in error


@pytest.mark.parametrize(
  "line",
  ['{"prompt": "a", "response": "\\ud800"}', '{"text": ' + "[" * 100_000],
  ids=["surrogate", "nested"],
)
def test_lines_that_python_stumbles_over_are_named(refused, tmp_path, line):
  file = runs.write_records(tmp_path / "odd.jsonl", 2)
  file.write_text(file.read_text() + line + "\n")
  assert f"{file}:3: " in refused(data__train=file)


@pytest.mark.parametrize(
  ("file", "fields", "message"),
  [
    (
      "tokenizer_config.json",
      {"added_tokens_decoder": [{"content": "<s>"}]},
      "added_tokens_decoder is [{'content': '<s>'}]",
    ),
    (
      "tokenizer_config.json",
      {"added_tokens_decoder": {"one": {"content": "<s>"}}},
      "'one'",
    ),
    (
      "tokenizer_config.json",
      {"added_tokens_decoder": {"1": "<s>"}},
      "added_tokens_decoder[1] is '<s>'",
    ),
    (
      "tokenizer_config.json",
      {"added_tokens_decoder": {"1": {"content": "<s>", "lstrip": "no"}}},
      "added_tokens_decoder[1].lstrip is 'no'",
    ),
    (
      "tokenizer_config.json",
      {"extra_special_tokens": 7},
      "extra_special_tokens is 7",
    ),
    (
      "tokenizer_config.json",
      {"chat_template": [{"name": "default"}]},
      "chat_template is {'name': 'default'}",
    ),
    ("tokenizer_config.json", {"chat_template": 3}, "chat_template is 3"),
    ("config.json", {"eos_token_id": "two"}, "eos_token_id is 'two'"),
    ("generation_config.json", {"eos_token_id": [2, 1.5]}, "eos_token_id is 1.5"),
    ("config.json", {"text_config": [1]}, "text_config is [1]"),
  ],
)
def test_misshapen_tokenizer_files_are_named(
  refused, model, tmp_path, file, fields, message
):
  folder = copy_model(model, tmp_path / "m")
  path = folder / file
  before = json.loads(path.read_text()) if path.is_file() else {}
  path.write_text(json.dumps(before | fields))
  error = refused(model__path=folder)
  assert f"{path}: " in error and message in error


def test_a_batch_that_does_not_divide_the_mesh(refused):
  error = refused(mesh__fsdp=8, model__path="/never/looked/at")
  assert "training.micro_batch_size is 4" in error


def test_no_output_dir(refused):
  assert "output_dir " in refused(output_dir="null")


def test_an_output_folder_that_is_a_file(settings, tmp_path, capsys):
  (tmp_path / "file").write_text("")
  settings |= {"output_dir": tmp_path / "file"}
  assert runs.tunix("train", *runs.arguments(**settings)) != 0
  error = capsys.readouterr().err
  assert error.startswith("tunix: error: ")
  assert error.count("\n") == 1


def test_a_full_disk_while_saving_keeps_the_checkpoints_before(settings, tmp_path):
  out = settings["output_dir"]
  keys = settings | {"checkpoint__every_n_steps": 2, "export__kind": "none"}
  first = keys | {"training__max_steps": 2}
  assert runs.tunix("train", *runs.arguments(**first)) == 0
  before = {
    p: p.read_bytes() for p in (out / "checkpoints/2").rglob("*") if p.is_file()
  }

  more = keys | {"training__max_steps": 8}
  process = runs.spawn("train", *runs.arguments(**more), max_file_blocks=90)
  _, error = process.communicate(timeout=300)
  assert process.returncode == 1
  assert "training: step " in error
  error = runs.without_progress(error)
  assert error.startswith("tunix: error: ") and "make room" in error
  assert error.count("\n") == 1
  assert {p: p.read_bytes() for p in before} == before
  # With room again the same command goes on from there.
  assert runs.tunix("train", *runs.arguments(**more)) == 0
  assert sorted(runs.metrics(out)) == list(range(1, 9))


def test_a_full_disk_while_exporting_leaves_no_half_folder(settings, tmp_path):
  keys = settings | {"export__kind": "none"}
  assert runs.tunix("train", *runs.arguments(**keys)) == 0

  target = tmp_path / "exported"
  words = ["export", "--run", settings["output_dir"], "--to", target]
  process = runs.spawn(*words, max_file_blocks=90)
  _, error = process.communicate(timeout=300)
  assert process.returncode == 1
  assert "make room" in error
  assert error.count("\n") == 1
  assert not target.exists()
  assert not list(tmp_path.glob(".exported*"))


@pytest.mark.parametrize(
  ("place", "problem"),
  [
    ("file", "is a file"),
    ("file/below", "is a file"),
    ("x" * 300, "file name too long"),
    pytest.param(
      "closed/below",
      "cannot be written",
      marks=pytest.mark.skipif(not os.geteuid(), reason="nothing is closed to root"),
    ),
  ],
)
def test_an_output_dir_that_cannot_be_written(
  settings, capsys, tmp_path, place, problem
):
  (tmp_path / "file").write_text("")
  (tmp_path / "closed").mkdir(mode=0o500)
  keys = settings | {"output_dir": tmp_path / place, "data__train": "/not/looked/at"}
  assert runs.tunix("train", *runs.arguments(**keys)) == 2
  error = capsys.readouterr().err
  assert "output_dir is" in error and problem in error and "Errno" not in error


def test_errors_of_the_system_have_no_number(capsys, monkeypatch):
  def closed(argv):
    raise PermissionError(13, "Permission denied", "/some/file")

  monkeypatch.setattr(cli, "_load", lambda name: types.SimpleNamespace(main=closed))
  assert runs.tunix("train") == 1
  error = capsys.readouterr().err
  assert error.startswith("tunix: error: /some/file: Permission denied")
  assert "Errno" not in error


def test_rows_that_memory_cannot_hold(refused):
  error = refused(data__max_length=10**9, data__pad_to="max_length")
  assert "data.max_length is 1000000000" in error
