"""The sums and their files, the tokenizer, the model, and the rewards of answers."""

import pytest

from tunix.cli.make import rewards
from tunix.data import pipeline, supervision
from tunix.data.formats import JsonlRecords
from tunix.data.records import PROMPT_ROWS
from tunix.examples.quickstart import task
from tunix.models.automodel import AutoModel
from tunix.rl.reward.rewards import RewardManager

RECORD = {"prompt": "3+8+5=", "response": "[16]"}


def test_all_sums_are_there_once():
  train, held_out = task.problems(0)
  assert (len(train), len(held_out)) == (800, 200)
  assert len({record["prompt"] for record in train + held_out}) == 1000
  assert RECORD in train + held_out
  for record in train[:50]:
    terms = record["prompt"].rstrip("=").split("+")
    assert record["response"] == f"[{sum(map(int, terms))}]"
  assert task.problems(1) != (train, held_out)


@pytest.mark.parametrize(
  ("text", "has_form", "is_right"),
  [
    ("[16]", True, True),
    ("[17]", True, False),
    ("[]", False, False),
    ("16", False, False),
    ("[16]]", False, False),
    ("", False, False),
  ],
)
def test_rewards_of_answers(text, has_form, is_right):
  functions = [rewards.function(entry) for entry in task.REWARDS]
  manager = RewardManager(functions, task.WEIGHTS)
  columns = {"response": [RECORD["response"]]}
  total = manager.compute([RECORD["prompt"]], [text], columns).total[0]
  assert total == pytest.approx(1.0 * is_right + 0.1 * has_form)
  assert (total >= task.RIGHT) == is_right


def test_the_alphabet_holds_every_character():
  train, _ = task.problems(0, 1)
  used = {c for record in train for c in record["prompt"] + record["response"]}
  assert used == set(task.ALPHABET)


@pytest.fixture(scope="module")
def tokenizer():
  return task.make_tokenizer()


def test_both_jobs_read_the_files(tmp_path):
  files = tmp_path / "train.jsonl", tmp_path / "eval.jsonl"
  question = task.write_data(*files, seed=0)
  for file, count in zip(files, (800, 200)):
    assert JsonlRecords(file).validate() == {"prompt": count}
    rows = list(JsonlRecords(file, PROMPT_ROWS).read())
    assert len(rows) == count and rows[0].extra.keys() == {"response"}
  assert rows[0].prompt == question["prompt"]
  assert question["prompt"] not in files[0].read_text()


def test_the_bytes_depend_only_on_the_seed(tmp_path):
  files = [tmp_path / f"{i}.jsonl" for i in range(3)]
  for file, seed in zip(files, (0, 0, 1)):
    task.write_data(file, tmp_path / "eval.jsonl", seed=seed)
  first, again, other = (file.read_bytes() for file in files)
  assert first == again != other


def test_the_model_is_written_with_its_tokenizer(tokenizer, tmp_path):
  parameters = task.write_model(tmp_path, seed=0)
  assert parameters == 428_928
  assert AutoModel.from_pretrained(tmp_path).config.vocab_size == 18
  loaded = type(tokenizer).from_pretrained(tmp_path)
  assert loaded.vocab_size == tokenizer.vocab_size == 4 + len(task.ALPHABET)
  text = "1+2+3=[6]"
  assert loaded.decode(loaded.encode(text)) == text
  assert len(loaded.encode(text)) == len(text)
  roles = ("pad_id", "bos_id", "eos_id")
  assert [getattr(loaded, role)() for role in roles] == [0, 1, 2]


def test_answers_and_their_ends_are_trained(tokenizer):
  rows = pipeline.build_dataset(
    [RECORD], tokenizer, batch_size=1, max_length=24, shuffle=False
  )
  batch = next(iter(rows))
  trained = batch["input_tokens"][supervision.trained_targets(batch)]
  assert tokenizer.decode(trained, skip_special_tokens=False) == "[16]<end>"
