"""The splits of the real standard library, and the tokenizer trained on them."""

import collections
import json
import pathlib
import sysconfig

import pytest

from tunix.cli.quickstart import data as quickstart_data, task
from tunix.cli.quickstart.data import SHARES, split_modules
from tunix.data import pipeline, supervision
from tunix.data.formats import JsonlRecords


@pytest.fixture(scope="module")
def data(tmp_path_factory):
  return quickstart_data.build_data(tmp_path_factory.mktemp("data"), held_out=40)


@pytest.fixture(scope="module")
def tokenizer(data):
  return quickstart_data.train_tokenizer(data, 512)


def records(data, name):
  return [json.loads(line) for line in data.path(name).open(encoding="utf-8")]


def test_every_module_is_in_one_split(data):
  counts = collections.Counter(m for found in data.modules.values() for m in found)
  assert set(counts.values()) == {1}
  assert all(len(found) > 20 for found in data.modules.values())


def test_shares_are_kept_and_depend_on_the_seed():
  sizes = {f"m{i}": 1 + i % 7 for i in range(200)}
  total = sum(sizes.values())
  first = split_modules(sizes, 0)
  for split, share in SHARES.items():
    filled = sum(size for m, size in sizes.items() if first[m] == split)
    assert filled / total == pytest.approx(share, abs=0.02)
  assert split_modules(dict(reversed(sizes.items())), 0) == first
  assert split_modules(sizes, 1) != first


def test_files_hold_valid_records(data):
  for name, count in data.records.items():
    kind = "text" if name.startswith("pretrain") else "messages"
    assert JsonlRecords(data.path(name)).validate() == {kind: count}
  assert data.records["finetune"] > 1000
  assert data.records["pretrain_eval"] == data.records["finetune_eval"] == 40


def test_nothing_held_out_is_trained_on(data):
  trained = data.path("pretrain").read_text() + data.path("finetune").read_text()
  learned = [r["messages"] for r in records(data, "finetune")]
  asked = {user["content"] for user, _ in learned}
  said = {answer["content"].split("Summary: ")[1] for _, answer in learned}
  for user, answer in (r["messages"] for r in records(data, "finetune_eval")):
    assert user["content"] not in asked
    assert answer["content"].split("Summary: ")[1] not in said
  for record in records(data, "pretrain_eval"):
    assert json.dumps(record, ensure_ascii=False) not in trained


def test_held_out_functions_belong_to_the_file(data):
  written = [r["messages"][0]["content"] for r in records(data, "finetune_eval")]
  assert [f.signature for f in data.held_out] == written
  assert {f.module for f in data.held_out} <= set(data.modules["held_out"])


def test_the_right_answers_pass_the_check(data):
  for record in records(data, "finetune"):
    user, assistant = record["messages"]
    check = task.check(user["content"], assistant["content"])
    assert check.format and check.name and check.arguments


def test_the_bytes_depend_on_library_and_seed_alone(tmp_path):
  # A package of the library stands for all of it, with its files as modules.
  library = pathlib.Path(sysconfig.get_path("stdlib")) / "asyncio"
  one, again, other = (
    quickstart_data.build_data(tmp_path / name, stdlib=library, seed=seed)
    for name, seed in (("one", 0), ("again", 0), ("other", 1))
  )
  for name in one.records:
    assert again.path(name).read_bytes() == one.path(name).read_bytes()
  assert other.modules != one.modules


def test_tokenizer_survives_saving(tokenizer, tmp_path):
  tokenizer.save(tmp_path)
  loaded = type(tokenizer).from_pretrained(tmp_path)
  assert loaded.vocab_size == tokenizer.vocab_size == 512
  text = "def tänzer(self):\n    return 'ü'\t# λ"
  assert loaded.decode(loaded.encode(text)) == text
  assert loaded.encode(text) == tokenizer.encode(text)
  roles = ("pad_id", "bos_id", "eos_id")
  assert [getattr(loaded, role)() for role in roles] == [0, 1, 2]
  turns = [{"role": "user", "content": "def f()"}]
  prompt = loaded.apply_chat_template(turns)
  assert prompt == "<|begin|><|user|>def f()<|end|><|assistant|>"
  with pytest.raises(ValueError, match="roles user and assistant"):
    loaded.apply_chat_template([{"role": "system", "content": "Be brief."}])


def test_answers_and_their_ends_are_what_is_trained(data, tokenizer):
  rows = pipeline.build_dataset(
    records(data, "finetune")[:1],
    tokenizer,
    batch_size=1,
    max_length=256,
    shuffle=False,
  )
  batch = next(iter(rows))
  answer = records(data, "finetune")[0]["messages"][1]["content"]
  trained = batch["input_tokens"][supervision.trained_targets(batch)]
  shown = tokenizer.decode(trained, skip_special_tokens=False)
  assert shown == answer + "<|end|>"
