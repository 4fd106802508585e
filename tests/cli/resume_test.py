"""What a run compares when it goes on, what it does not do twice, and who may run."""

import errno
import fcntl
import json
import math
import os
import shutil
import subprocess
import sys

import pytest
import yaml

from tests.cli import runs
from tests.cli.errors_test import copy_model
from tunix.cli import config as config_lib
from tunix.cli.make import data as build_data, loading
from tunix.cli.run.folder import RunFolder
from tunix.cli.run.prepare import prepare
from tunix.cli.run.result import Result, how_to_train_longer
from tunix.models.files import tensor_files
from tunix.utils import folder_lock as run_lock


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


def check(keys, **more):
  """What `tunix train` looks at before it goes on."""
  return prepare(config_lib.load(runs.arguments(**(keys | more)))).data


def test_moved_inputs_resume(keys, model, train_file, eval_file, tmp_path, capsys):
  moved = tmp_path / "moved"
  shutil.copytree(model, moved)
  for name, file in (("t.jsonl", train_file), ("e.jsonl", eval_file)):
    shutil.copyfile(file, tmp_path / name)
  more = {"model__path": moved, "data__train": tmp_path / "t.jsonl"}
  assert train(keys, **more, data__eval=tmp_path / "e.jsonl") == 0
  assert "resuming after step 2" in capsys.readouterr().out


def test_another_base_model_cannot_resume(keys, model, tmp_path, capsys):
  changed = copy_model(model, tmp_path / "theta", rope_theta=123.0)
  error = refused(keys, capsys, model__path=changed)
  assert "model.path" in error


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj"])
@pytest.mark.parametrize("at", [0, -1])
def test_weights_changed_in_place_are_noticed(keys, model, tmp_path, name, at):
  copy = copy_model(model, tmp_path / "copy")
  check(keys, model__path=copy)
  tensors = tensor_files.open_folder(copy)
  (tensor,) = (tensors[key] for key in tensors if key.startswith(name))
  size = math.prod(tensor.shape) * tensor.dtype.itemsize
  with tensor.file.open("r+b") as stream:
    stream.seek(tensor.offset + at % size)
    byte = stream.read(1)[0]
    stream.seek(-1, 1)
    stream.write(bytes([byte ^ 1]))
  with pytest.raises(ValueError, match=r"model\.path"):
    check(keys, model__path=copy)


def test_another_tokenizer_cannot_resume(keys, model, tmp_path):
  other = tmp_path / "tokenizer"
  other.mkdir()
  for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
    shutil.copyfile(model / name, other / name)
  check(keys, tokenizer__path=other)
  source = json.loads((other / "tokenizer.json").read_text())
  source["model"]["merges"].pop()
  (other / "tokenizer.json").write_text(json.dumps(source))
  with pytest.raises(ValueError, match=r"tokenizer\.path"):
    check(keys, tokenizer__path=other)
  shutil.copyfile(model / "tokenizer.json", other / "tokenizer.json")
  config = json.loads((other / "tokenizer_config.json").read_text())
  config["eos_token"] = "<eos>"
  (other / "tokenizer_config.json").write_text(json.dumps(config))
  with pytest.raises(ValueError, match=r"tokenizer\.path"):
    check(keys, tokenizer__path=other)


def test_other_evaluation_data_cannot_resume_but_may_be_left_out(keys, tmp_path):
  other = runs.write_records(tmp_path / "other.jsonl", 6, start=1)
  with pytest.raises(ValueError, match=r"data\.eval"):
    check(keys, data__eval=other)
  check(keys, data__eval="null")


def test_another_chat_template_cannot_resume(keys, model, tmp_path):
  file = tmp_path / "mine.jinja"
  file.write_text((model / "chat_template.jinja").read_text())
  check(keys, tokenizer__chat_template=file)
  file.write_text(file.read_text() + " ")
  with pytest.raises(ValueError, match="chat_template"):
    check(keys, tokenizer__chat_template=file)


@pytest.mark.parametrize("name", ["config.yaml", "data.json"])
def test_without_its_records_a_run_cannot_resume(keys, name):
  (keys["output_dir"] / name).unlink()
  with pytest.raises(ValueError, match=name):
    check(keys)


# The scan.


@pytest.fixture
def scanned(monkeypatch):
  """Names of the files that are scanned from here on."""
  names = []
  scan = build_data.scan

  def spy(source, *args, **options):
    names.append(source.records.path.name)
    return scan(source, *args, **options)

  monkeypatch.setattr(build_data, "scan", spy)
  return names


def test_a_resumed_run_does_not_scan_again(keys, scanned):
  data = check(keys)
  assert scanned == []
  assert "16 records: 16 kept" in str(data.reports["train"])


def test_a_scan_is_done_again_for_another_place_or_a_damaged_file(
  keys, scanned, tmp_path
):
  copy = tmp_path / "copy.jsonl"  # its lines have other names
  shutil.copyfile(keys["data__eval"], copy)
  check(keys, data__eval=copy)
  assert scanned == ["copy.jsonl"]
  for text in ("{", "[1]"):
    scanned.clear()
    (keys["output_dir"] / "scan.json").write_text(text)
    check(keys)
    assert scanned == ["train.jsonl", "eval.jsonl"]


@pytest.mark.parametrize(
  "changed",
  [
    {"data__max_length": 50},
    {"data__overlong": "drop"},
    {"data__chat": "true"},
    {"data__template_args": "{mark: 1}"},
    {"data__scan_limit": 3},
    {"tokenizer__add_bos": "true"},
    {"tokenizer__messages": "given"},
  ],
)
def test_every_setting_of_a_scan_is_part_of_its_key(begun, scanned, changed):
  def data(known, **more):
    config = config_lib.load(runs.arguments(**(begun | more)))
    return build_data.build_data(config, loading.ModelLoader(config).tokenizer(), known)

  first = data(None)
  scanned.clear()
  assert data(first.scans).reports == first.reports
  assert scanned == []
  data(first.scans, **changed)
  assert scanned == ["train.jsonl", "eval.jsonl"]


# Defaults that have changed.


def test_a_folder_from_before_a_key_keeps_what_it_did(begun, tmp_path):
  """As before data.pad_to, data.reasoning and tokenizer.messages."""
  out = tmp_path / "out"
  long = begun | {"data__max_length": 128, "output_dir": out}
  former = {"data__pad_to": "max_length", "data__reasoning": "keep"}
  assert train(long | former, tokenizer__messages="given") == 0
  text = (out / "config.yaml").read_text()
  added = "pad_to: max_length", "reasoning: keep", "messages: given", "add_bos: null"
  for line in added:
    assert f"  {line}\n" in text
    text = text.replace(f"  {line}\n", "")
  values = yaml.safe_load(text)
  del values["optimizer"]["decay_targets"]
  (out / "config.yaml").write_text(yaml.safe_dump(values))
  assert RunFolder(out).read_config().tokenizer.add_bos is True

  def shapes(**more):
    data = check(long, training__max_steps=3, **more)
    first = next(iter(data.train)), *data.eval
    return {batch["input_tokens"].shape for batch in first}

  assert shapes() == {(4, 128)}
  for key, was in (("tokenizer__messages", "given"), ("data__reasoning", "keep")):
    now = {"given": "plain", "keep": "strip"}[was]
    with pytest.raises(ValueError, match=f"was '{was}' and is '{now}'"):
      shapes(**{key: now})
  assert shapes(output_dir=tmp_path / "new") == {(4, 64)}
  with pytest.raises(ValueError, match="pad_to was 'max_length' and is 'longest'"):
    shapes(data__pad_to="longest")
  # A run that is begun now keeps its own.
  assert train(long | {"output_dir": tmp_path / "new"}) == 0
  assert shapes(output_dir=tmp_path / "new") == {(4, 64)}


def test_a_folder_from_before_decay_targets_decays_everything(keys):
  file = keys["output_dir"] / "config.yaml"
  values = yaml.safe_load(file.read_text())
  now = values["optimizer"].pop("decay_targets")
  settled = lambda: prepare(config_lib.load(runs.arguments(**keys))).config
  assert list(settled().optimizer.decay_targets) == now != [".*"]
  file.write_text(yaml.safe_dump(values))
  assert settled().optimizer.decay_targets == (".*",)


# Going on after the end.


ONE_EPOCH = {"data__num_epochs": 1}  # 16 records: 4 steps of 4
SCHEDULE = {"schedule__name": "cosine_decay_schedule"}


@pytest.mark.parametrize(
  ("more", "steps", "advice"),
  [
    ({}, 2, "raise training.max_steps to go on"),
    (ONE_EPOCH, 2, "raise training.max_steps to go on"),
    (ONE_EPOCH | {"training__max_steps": 4}, 4, "with --model.path=/out/export and"),
    (ONE_EPOCH | {"training__max_steps": 5}, 4, "with --model.path=/out/export and"),
    ({"training__max_steps": "null"}, 4, "with --model.path=/out/export and"),
    (SCHEDULE, 2, "to train longer, start from it with --model.path=/out/export and"),
    (SCHEDULE | {"lora__rank": 2}, 2, "to train longer, use another output_dir"),
    (SCHEDULE | {"export__kind": "none"}, 2, "to train longer, use another output_dir"),
  ],
)
def test_advice_after_the_end(settings, more, steps, advice):
  keys = settings | {"training__max_steps": 2} | more
  config = config_lib.load(runs.arguments(**keys))
  run = prepare(config)
  export = None if config.export_kind == "none" else "/out/export"
  result = Result(steps=steps, export=export)
  assert advice in how_to_train_longer(run.config, run.data, result)


def test_a_schedule_cannot_be_made_longer_and_the_advice_says_so(settings, capsys):
  keys = settings | SCHEDULE | {"training__max_steps": 1}
  assert train(keys) == 0
  assert train(keys) == 0
  line = capsys.readouterr().out.splitlines()[-1]
  export = f"--model.path={keys['output_dir']}/export"
  assert line.startswith("this run is finished: 1 step;")
  assert line.endswith(f"start from it with {export} and another output_dir")
  assert "schedule.args" in refused(keys, capsys, training__max_steps=2)


# The lock.


def test_a_second_process_is_refused_and_names_the_first(keys, capsys):
  out = keys["output_dir"]
  before = (out / "logs" / "metrics.jsonl").read_bytes()
  code = (
    "import pathlib, sys, time\nfrom tunix.utils import folder_lock as run_lock\n"
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


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_where_nothing_can_be_locked_nothing_is(tmp_path, monkeypatch, code):
  def unable(descriptor, kind):
    raise OSError(code, "no locks here")

  monkeypatch.setattr(fcntl, "flock", unable)  # as some network mounts do
  with run_lock.hold(tmp_path):
    run_lock.check(tmp_path)
    with run_lock.hold(tmp_path):
      pass


def test_a_folder_that_cannot_be_written_is_looked_at(tmp_path):
  with run_lock.hold(tmp_path):
    pass
  (tmp_path / run_lock.NAME).chmod(0o400)
  tmp_path.chmod(0o500)
  try:
    run_lock.check(tmp_path)
    if os.geteuid():  # nothing is closed to root
      with pytest.raises(PermissionError), run_lock.hold(tmp_path):
        pass
  finally:
    tmp_path.chmod(0o700)


def test_the_lock_ends_with_the_run(tmp_path):
  for _ in range(2):
    with run_lock.hold(tmp_path / "new"), pytest.raises(RuntimeError):
      run_lock.check(tmp_path / "new")
  run_lock.check(tmp_path / "new")
  assert (tmp_path / "new" / run_lock.NAME).stat().st_size
