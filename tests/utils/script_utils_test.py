"""Questions split into training and evaluation."""

import json
import sys
import types

import pytest

from tunix.utils import script_utils


def after_hashes(text):
  return text.split("####")[1].strip() if "####" in text else None


@pytest.fixture
def folder(tmp_path):
  lines = [{"question": f"q{i}", "answer": f"because #### {i}"} for i in range(10)]
  lines.append({"question": "open", "answer": "nobody knows"})
  (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
  return tmp_path


def both(folder, **change):
  values = {
    "data_path": str(folder),
    "split": "train",
    "seed": 0,
    "system_prompt": "Think.",
    "batch_size": 2,
    "num_batches": None,
    "train_fraction": 0.6,
    "num_epochs": 2,
    "answer_extractor": after_hashes,
    **change,
  }
  return script_utils.get_train_and_eval_datasets(**values)


def questions(dataset):
  return [q for batch in dataset for q in batch["question"]]


def test_examples_are_split_and_only_training_repeats(folder):
  train, held_out = both(folder)
  assert len(train) == 6 and len(held_out) == 2
  seen, kept = questions(train), questions(held_out)
  assert len(set(seen)) == 6 and not set(seen) & set(kept) and len(kept) == 4
  assert "open" not in seen + kept
  assert train[0]["prompts"][0] == [
    {"role": "user", "content": f"Think.\n\n{train[0]['question'][0]}"}
  ]
  assert train[0]["answer"][0] == train[0]["question"][0][1:]


def test_the_seed_orders(folder):
  assert questions(both(folder)[0]) == questions(both(folder)[0])
  assert questions(both(folder)[0]) != questions(both(folder, seed=1)[0])


def test_limits_and_no_evaluation(folder):
  train, held_out = both(folder, num_batches=1)
  assert len(train) == len(held_out) == 1
  train, held_out = both(folder, train_fraction=1.0, num_epochs=None)
  assert held_out is None and len(train) == 5


@pytest.mark.parametrize(
  ("change", "part"),
  [
    ({"train_fraction": 0.0}, "train_fraction is 0.0"),
    ({"train_fraction": 0.05}, "batch_size is"),
    ({"answer_extractor": lambda text: None}, "answer_extractor"),
  ],
)
def test_values_out_of_range(folder, change, part):
  with pytest.raises(ValueError, match=part):
    both(folder, **change)


def test_other_columns_are_named(tmp_path):
  (tmp_path / "x.jsonl").write_text('{"q": 1}\n')
  with pytest.raises(ValueError, match=r"fields 'q'"):
    both(tmp_path / "x.jsonl")


def test_broken_files_are_named(tmp_path):
  (tmp_path / "x.jsonl").write_text('{"question": "q", "answer": "#### 1"}\n[1]\n')
  with pytest.raises(ValueError, match=r"x\.jsonl:2: found a list"):
    both(tmp_path / "x.jsonl")
  (tmp_path / "x.jsonl").write_text("{\n")
  with pytest.raises(ValueError, match=r"x\.jsonl:1: invalid JSON"):
    both(tmp_path / "x.jsonl")
  with pytest.raises(FileNotFoundError, match="no such file"):
    both(tmp_path / "y.jsonl")


def test_without_a_file_tfds_is_asked(tmp_path, monkeypatch):
  with pytest.raises(ImportError, match="pip install tensorflow-datasets"):
    both(tmp_path)
  records = [{"question": b"q", "answer": b"#### 1"}] * 4
  asked = []

  def data_source(name, split, data_dir):
    asked.append((name, split, data_dir))
    return records

  fake = types.SimpleNamespace(data_source=data_source)
  monkeypatch.setitem(sys.modules, "tensorflow_datasets", fake)
  train, _ = both(tmp_path, train_fraction=0.5)
  assert asked == [("gsm8k", "train", str(tmp_path))] and train[0]["answer"][0] == "1"
