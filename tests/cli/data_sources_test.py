import json
import pathlib
import sys
import types

import fsspec
import pytest

from tests.cli import runs
from tests.data.reading.stored_test import write_shards
from tunix.cli import config as config_lib
from tunix.cli.commands.train import run
from tunix.cli.make import data as build_data, data_sources, loading
from tunix.data.reading.array_record import ArrayRecords
from tunix.data.reading.jsonl import JsonlRecords
from tunix.data.reading.mixture import Mixture
from tunix.data.records import SFT

HALVES = {"data__weights": "[1, 1]"}
LATER = HALVES | {"data__weights_at": "{5: [1, 2]}"}
TEXTS = [{"text": f"record {i}"} for i in range(4)]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
  """Copies of buckets' files go to a folder of the test."""
  monkeypatch.setattr(pathlib.Path, "home", lambda: tmp_path / "home")


def write_lines(file, records=TEXTS):
  file.write_text("".join(json.dumps(record) + "\n" for record in records))
  return str(file)


def test_files_by_their_names(tmp_path):
  lines = data_sources.open_records(write_lines(tmp_path / "a.json"), SFT)
  assert isinstance(lines, JsonlRecords) and list(lines) == TEXTS
  pattern = write_shards(tmp_path, TEXTS)
  shards = data_sources.open_records(pattern, SFT)
  assert isinstance(shards, ArrayRecords) and len(shards) == 4
  both = data_sources.open_records([str(lines.path), pattern], SFT, [2, 1])
  assert isinstance(both, Mixture)
  assert both.sizes == (4, 4) and both.weights == (2, 1)
  assert isinstance(data_sources.open_records([pattern], SFT), ArrayRecords)


def test_columns_are_taken_by_our_names(tmp_path):
  rows = [{"question": f"q{i}", "answer": "a", "n": i} for i in range(3)]
  lines = write_lines(tmp_path / "a.jsonl", rows)
  columns = {"prompt": "question", "response": "answer"}
  expected = [{"n": i, "prompt": f"q{i}", "response": "a"} for i in range(3)]
  assert list(data_sources.open_records(lines, SFT, columns=columns)) == expected
  both = data_sources.open_records([lines, lines], SFT, [1, 1], columns)
  assert list(both) == expected * 2


def test_a_file_of_a_bucket_is_copied_until_it_changes(tmp_path):
  bucket = fsspec.filesystem("memory")
  bucket.pipe("/b/a.jsonl", b'{"text": "one"}\n')
  records = data_sources.open_records("memory://b/a.jsonl", SFT)
  assert records.where(0) == "memory://b/a.jsonl:1"
  copied = records.path
  assert copied.is_relative_to(tmp_path / "home/.cache/tunix/data")
  before = copied.stat().st_mtime_ns
  again = data_sources.open_records("memory://b/a.jsonl", SFT)
  assert again.path.stat().st_mtime_ns == before  # not copied anew
  bucket.pipe("/b/a.jsonl", b'{"text": "two"}\n{"text": "three"}\n')
  assert len(data_sources.open_records("memory://b/a.jsonl", SFT)) == 2
  with pytest.raises(FileNotFoundError, match=r"'memory://b/no\.jsonl' cannot be read"):
    data_sources.open_records("memory://b/no.jsonl", SFT)
  with pytest.raises(FileNotFoundError, match="Protocol not known"):
    data_sources.open_records("nowhere://b/no.jsonl", SFT)


@pytest.mark.parametrize(
  ("name", "package", "called"),
  [
    ("hf:org/set", "datasets", (("org/set",), {"split": "train"})),
    (
      "hf:org/set('main', split='test[:10%]')",
      "datasets",
      (("org/set", "main"), {"split": "test[:10%]"}),
    ),
    (
      "tfds:mtnt/en-fr(split='valid', download=True)",
      "tensorflow_datasets",
      (("mtnt/en-fr",), {"split": "valid", "download": True}),
    ),
  ],
)
def test_libraries_are_called_with_what_is_written(monkeypatch, name, package, called):
  calls = []

  def read(*args, **kwargs):
    calls.append((args, kwargs))
    return TEXTS

  function = {"datasets": "load_dataset", "tensorflow_datasets": "data_source"}[package]
  fake = types.SimpleNamespace(**{function: read})
  monkeypatch.setitem(sys.modules, package, fake)
  records = data_sources.open_records(name, SFT)
  assert list(records) == TEXTS and records.where(1) == f"{name}, record 1"
  assert calls == [called]

  def fail(*args, **kwargs):
    raise ConnectionError("no route\nto the hub")

  setattr(fake, function, fail)
  message = r"cannot be read \(ConnectionError: no route\)"
  with pytest.raises(FileNotFoundError, match=message):
    data_sources.open_records(name, SFT)
  monkeypatch.setitem(sys.modules, package, None)
  with pytest.raises(ImportError, match=r"needs the package .*: pip install tunix"):
    data_sources.open_records(name, SFT)


def test_a_function_of_a_file_or_module(tmp_path, monkeypatch):
  file = tmp_path / "my_records.py"
  file.write_text(
    "def create_dataset(word='a', count=2):\n"
    "  if count < 0: raise KeyError('count')\n"
    "  return [{'text': word}] * count\n"
    "def nothing(): return None\n"
  )
  monkeypatch.syspath_prepend(tmp_path)
  for name in (f"{file}", f"{file}:create_dataset", "my_records:create_dataset()"):
    assert list(data_sources.open_records(name, SFT)) == [{"text": "a"}] * 2
  called = data_sources.open_records(f"{file}:create_dataset('b', count=3)", SFT)
  assert list(called) == [{"text": "b"}] * 3
  for name, kind, message in (
    ("create_dataset(count=-1)", RuntimeError, "create_dataset raised KeyError"),
    ("nothing", TypeError, "nothing is None"),
    ("absent", ValueError, "has no function 'absent'"),
    ("create_dataset(count=0)", ValueError, "is empty; expected"),
  ):
    with pytest.raises(kind, match=message):
      data_sources.open_records(f"{file}:{name}", SFT)
  with pytest.raises(ImportError, match="no_such_module cannot be imported"):
    data_sources.open_records("no_such_module:fn", SFT)


def test_places_are_written_out(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  write_lines(tmp_path / "a.jsonl")
  (tmp_path / "f.py").write_text("")
  names = ("a.jsonl", "b.jsonl", "f.py:fn(x='y.z')", "hf:a/b", "gs://b/*.json", "s-*.x")
  assert data_sources.with_absolute_paths("f.py") == f"{tmp_path}/f.py"
  assert data_sources.with_absolute_paths(names) == (
    f"{tmp_path}/a.jsonl",
    "b.jsonl",  # it does not exist: said later, as it was written
    f"{tmp_path}/f.py:fn(x='y.z')",
    "hf:a/b",
    "gs://b/*.json",
    f"{tmp_path}/s-*.x",
  )


@pytest.mark.parametrize(
  ("more", "message"),
  [
    ({"data__weights": "[0, 0]"}, r"data.weights is .0.0, 0.0.; expected a number abo"),
    ({"data__weights": "[1, -1]"}, r"data.weights\[1\] is -1"),
    ({"data__weights": "[1, .nan]"}, r"data.weights\[1\] is nan"),
    ({"data__weights": "[1]"}, "data.weights is .1.0."),
    ({"data__weights_at": "{5: [1, 1]}"}, "data.weights is not set"),
    ({**HALVES, "data__weights_at": "{5: [1]}"}, "expected 2 numbers"),
    ({**HALVES, "data__weights_at": "{0: [1, 1]}"}, "a step of weights_at is 0"),
    ({**LATER, "data__packing": "true"}, "no fixed number of records"),
    ({"data__weights": "much"}, "data.weights is the text 'much', expected a list"),
    (
      {"data__columns": "{prompt: question}"},
      "'question' for 'prompt'; the record has 'text'",
    ),
    ({"data__train": "[]"}, "the list of files is empty"),
    (
      {"data__length_buckets": "[40, 20]"},
      "data.length_buckets .40, 20.: expected asc",
    ),
    (
      {"data__length_buckets": "[20]", "data__packing": "true"},
      "data.length_buckets is .20. and data.packing is true",
    ),
    (
      {"data__packing": "true", "data__pad_to": "longest"},
      "data.pad_to is 'longest' and data.packing is set",
    ),
    (
      {"data__length_buckets": "[20]", "data__pad_to": "longest"},
      "data.pad_to is 'longest' and data.length_buckets is set",
    ),
  ],
)
def test_wrong_settings_are_refused(settings, tmp_path, more, message):
  files = [write_lines(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
  keys = {**settings, "data__train": json.dumps(files), **more}
  with pytest.raises(ValueError, match=message):
    records = build_data.open_records(config_lib.load(runs.arguments(**keys)))
    records["train"].validate()


def test_a_run_on_a_mixture_in_buckets_goes_on_exactly(
  settings, train_file, tmp_path, capsys
):
  """The last loss of a run cut in two is, bit by bit, that of one run."""
  small = write_lines(tmp_path / "small.jsonl", [{"text": "The sea is wide."}] * 3)
  unused = write_lines(tmp_path / "unused.jsonl", [{"text": "The mill"}] * 50)
  keys = {
    **settings,
    "data__train": json.dumps([str(train_file), unused, small]),
    "data__weights": "[1, 0, 3]",
    "data__length_buckets": "[16, 32]",
    "data__num_epochs": "3",
  }
  config = config_lib.load(runs.arguments(**keys))
  loaded = build_data.build_data(config, loading.ModelLoader(config).tokenizer())
  assert "75.0% from" in str(loaded.reports["train"])
  assert loaded.num_steps == 4  # of three passes of 19 records in fours: 15
  widths = {batch["input_tokens"].shape[1] for batch in loaded.train}
  assert len(widths) > 1 and max(widths) == 48

  def train(folder, **more):
    del keys["output_dir"]
    made = {**keys, **more, "output_dir": tmp_path / folder}
    run(config_lib.load(runs.arguments(**made)))
    keys["output_dir"] = tmp_path / folder
    return runs.metrics(tmp_path / folder)

  whole = train("whole")
  train("parts", training__max_steps=2)
  assert train("parts")[4]["loss"] == whole[4]["loss"]
  with pytest.raises(ValueError, match=r"data\.weights"):
    train("parts", data__weights="[1, 1, 0]", training__max_steps=6)
