"""What a run compares when it goes on, what it does not do twice, and who may run."""

import json
import shutil
import subprocess
import sys

import pytest

from tests.cli import runs
from tests.cli.errors_test import copy_model
from tunix.cli import build_data, run_lock
from tunix.models import safetensors_saver, tensor_files
from tunix.models.automodel import AutoModel


def train(keys, **more):
  return runs.tunix("train", *runs.arguments(**(keys | more)))


@pytest.fixture(scope="module")
def begun(model, train_file, eval_file, tmp_path_factory):
  """Keys of a finished LoRA run of two steps; copied before it is changed."""
  keys = {
    "model__path": model,
    "data__train": train_file,
    "data__eval": eval_file,
    "data__max_length": 48,
    "lora__rank": 2,
    "training__max_steps": 2,
    "training__global_batch_size": 4,
    "logging__tensorboard": "false",
    "output_dir": tmp_path_factory.mktemp("begun") / "out",
  }
  assert train(keys) == 0
  return keys


@pytest.fixture
def keys(begun, tmp_path):
  """The run in a folder of its own, asked to go on to step 3."""
  out = tmp_path / "out"
  shutil.copytree(begun["output_dir"], out)
  return begun | {"output_dir": out, "training__max_steps": 3}


def refused(keys, capsys, code=2, **more):
  assert train(keys, **more) == code
  error = capsys.readouterr().err
  assert error.startswith("tunix: error: ")
  assert error.count("\n") == 1
  return error


# The base model, the tokenizer and the data.


def test_moved_inputs_resume(keys, model, train_file, eval_file, tmp_path, capsys):
  moved = tmp_path / "moved"
  shutil.copytree(model, moved)
  for name, file in (("t.jsonl", train_file), ("e.jsonl", eval_file)):
    shutil.copyfile(file, tmp_path / name)
  more = {"model__path": moved, "data__train": tmp_path / "t.jsonl"}
  assert train(keys, **more, data__eval=tmp_path / "e.jsonl") == 0
  assert "resuming after step 2" in capsys.readouterr().out


def test_another_base_model_cannot_resume(keys, model, tmp_path, capsys):
  other = tmp_path / "other"
  trained = AutoModel.from_pretrained(model)
  kernel = trained.layers.attn.q_proj.kernel
  kernel.set_value(kernel[...] * 1.5)
  safetensors_saver.save_pretrained(trained, other, source=model)
  error = refused(keys, capsys, model__path=other)
  assert "the model in model.path is another" in error
  changed = copy_model(model, tmp_path / "theta", rope_theta=123.0)
  assert "the model in model.path" in refused(keys, capsys, model__path=changed)


@pytest.mark.parametrize("at", ["first", "last"])
def test_weights_changed_in_place_are_noticed(keys, model, tmp_path, capsys, at):
  copy = copy_model(model, tmp_path / "copy")
  file = copy / tensor_files.SINGLE
  header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
  position = header if at == "first" else file.stat().st_size - 1
  with file.open("r+b") as stream:
    stream.seek(position)
    byte = stream.read(1)[0]
    stream.seek(position)
    stream.write(bytes([byte ^ 1]))
  assert "the model in model.path is another" in refused(keys, capsys, model__path=copy)


def test_another_tokenizer_cannot_resume(keys, model, tmp_path, capsys):
  other = tmp_path / "tokenizer"
  other.mkdir()
  for file in model.glob("*token*"):
    shutil.copyfile(file, other / file.name)
  shutil.copyfile(model / "chat_template.jinja", other / "chat_template.jinja")
  same = dict(tokenizer__path=other)
  source = json.loads((other / "tokenizer.json").read_text())
  source["model"]["merges"].pop()
  (other / "tokenizer.json").write_text(json.dumps(source))
  error = refused(keys, capsys, **same)
  assert "the tokenizer is another" in error
  shutil.copyfile(model / "tokenizer.json", other / "tokenizer.json")
  assert train(keys, **same) == 0


def test_other_evaluation_data_cannot_resume_but_may_be_left_out(
  keys, tmp_path, capsys
):
  other = runs.write_records(tmp_path / "other.jsonl", 6, start=1)
  error = refused(keys, capsys, data__eval=other)
  assert "the content of data.eval is another" in error
  assert train(keys, data__eval="null") == 0


def test_another_chat_template_cannot_resume(keys, model, tmp_path, capsys):
  file = tmp_path / "mine.jinja"
  file.write_text((model / "chat_template.jinja").read_text() + " ")
  error = refused(keys, capsys, tokenizer__chat_template=file)
  assert "the content of the chat template is another" in error


@pytest.mark.parametrize("name", ["config.yaml", "data.json"])
def test_without_its_records_a_run_cannot_resume(keys, capsys, name):
  (keys["output_dir"] / name).unlink()
  assert f"its {name} is gone" in refused(keys, capsys)


# The scan.


@pytest.fixture
def scanned(monkeypatch):
  """Names of the files that are scanned from here on."""
  names = []
  scan = build_data.scan

  def spy(records, *args, **options):
    names.append(records.path.name)
    return scan(records, *args, **options)

  monkeypatch.setattr(build_data, "scan", spy)
  return names


def test_a_resumed_run_does_not_scan_again(keys, scanned, capsys):
  assert train(keys) == 0
  assert scanned == []
  assert "train data: 16 records: 16 kept" in capsys.readouterr().out


def test_a_scan_with_other_settings_or_a_lost_file_is_done_again(
  keys, scanned, tmp_path
):
  assert train(keys, data__scan_limit=4) == 0
  assert scanned == ["train.jsonl", "eval.jsonl"]
  copy = tmp_path / "copy.jsonl"  # its lines have other names
  shutil.copyfile(keys["data__eval"], copy)
  scanned.clear()
  assert train(keys, data__scan_limit=4, data__eval=copy) == 0
  assert scanned == ["copy.jsonl"]
  for text in ("{", "[1]"):
    scanned.clear()
    (keys["output_dir"] / "scan.json").write_text(text)
    assert train(keys, data__scan_limit=4) == 0
    assert scanned == ["train.jsonl", "eval.jsonl"]


@pytest.mark.parametrize(
  "changed",
  [
    {"data__max_length": 50},
    {"data__overlong": "drop"},
    {"data__chat": "true"},
    {"data__template_args": "{mark: 1}"},
    {"data__scan_limit": 3},
  ],
)
def test_every_setting_of_a_scan_is_part_of_its_key(begun, scanned, changed):
  from tunix.cli import build, config as config_lib

  def data(known, **more):
    config = config_lib.load(runs.arguments(**(begun | more)))
    return build_data.build_data(config, build.build_tokenizer(config), known)

  first = data(None)
  scanned.clear()
  assert data(first.scans).reports == first.reports
  assert scanned == []
  data(first.scans, **changed)
  assert scanned == ["train.jsonl", "eval.jsonl"]


# Going on after the end.


def finished_line(capsys):
  (line,) = (x for x in capsys.readouterr().out.splitlines() if "is finished" in x)
  return line


@pytest.mark.parametrize(
  ("more", "advice"),
  [
    ({}, "raise training.max_steps to go on"),
    ({"data__num_epochs": 9}, "raise training.max_steps to go on"),
    (  # 16 records are one step of 16: the data ends first
      {"data__num_epochs": 1, "training__global_batch_size": 16},
      "start from it with --model.path=",
    ),
    (  # the data ends with the last step
      {
        "data__num_epochs": 1,
        "training__global_batch_size": 16,
        "training__max_steps": 1,
      },
      "start from it with --model.path=",
    ),
    ({"schedule__name": "cosine_decay_schedule"}, "start from it with --model.path="),
    (
      {"schedule__name": "cosine_decay_schedule", "lora__rank": 2},
      "to train longer, use another output_dir",
    ),
    (
      {"schedule__name": "cosine_decay_schedule", "export__kind": "none"},
      "to train longer, use another output_dir",
    ),
  ],
)
def test_a_finished_run_says_how_to_go_on(settings, capsys, more, advice):
  keys = settings | {"training__max_steps": 2} | more
  assert train(keys) == 0
  capsys.readouterr()
  assert train(keys) == 0
  line = finished_line(capsys)
  assert advice in line
  raised = train(keys, training__max_steps=4)
  # The advice is true: it works exactly where it is given.
  went_on = raised == 0 and "resuming after" in capsys.readouterr().out
  steps = max(runs.metrics(keys["output_dir"]))
  assert (went_on and steps == 4) == ("raise" in advice)


# The lock.


def test_a_second_process_is_refused_and_names_the_first(keys, capsys):
  out = keys["output_dir"]
  before = (out / "logs" / "metrics.jsonl").read_bytes()
  code = (
    "import pathlib, sys, time\nfrom tunix.cli import run_lock\n"
    "with run_lock.hold(pathlib.Path(sys.argv[1])):\n"
    "  print('held', flush=True); time.sleep(600)"
  )
  holder = subprocess.Popen(
    [sys.executable, "-c", code, str(out)], stdout=subprocess.PIPE, text=True
  )
  try:
    assert holder.stdout.readline() == "held\n"
    error = refused(keys, capsys, code=1)
    assert f"process {holder.pid} is training in {out}" in error
    assert (out / "logs" / "metrics.jsonl").read_bytes() == before
  finally:
    holder.kill()
    holder.wait()
  # Killed without a chance to clean up: nothing is left in the way.
  assert train(keys) == 0


def test_a_lock_taken_meanwhile_is_seen_before_anything_is_written(
  keys, capsys, monkeypatch
):
  monkeypatch.setattr(run_lock, "check", lambda folder: None)
  config = (keys["output_dir"] / "config.yaml").read_bytes()
  with run_lock.hold(keys["output_dir"]):
    assert "is training in" in refused(keys, capsys, code=1)
  assert (keys["output_dir"] / "config.yaml").read_bytes() == config


def test_where_nothing_can_be_locked_runs_go_on(keys, monkeypatch):
  monkeypatch.setattr(run_lock, "_fcntl", None)
  with run_lock.hold(keys["output_dir"]):
    assert train(keys) == 0


def test_the_lock_ends_with_the_run(tmp_path):
  for _ in range(2):
    with run_lock.hold(tmp_path / "new"), pytest.raises(RuntimeError):
      run_lock.check(tmp_path / "new")
  run_lock.check(tmp_path / "new")
  assert (tmp_path / "new" / run_lock.NAME).stat().st_size
