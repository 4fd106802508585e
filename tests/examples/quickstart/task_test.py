"""The sums and their files, the tokenizer, and that the rewards of the configuration
agree with what counts as right."""

import json

import pytest

from tunix.cli.build import rewards
from tunix.data import pipeline, supervision
from tunix.data.formats import JsonlRecords
from tunix.data.records import PROMPT_ROWS
from tunix.examples.quickstart import task
from tunix.rl.rewards import RewardManager

RECORD = {"prompt": "3+8+5=", "response": "[16]", "answer": "16"}


def test_all_sums_are_there_once():
  train, held_out = task.problems(0, 200)
  assert (len(train), len(held_out)) == (800, 200)
  assert len({record["prompt"] for record in train + held_out}) == 1000
  assert RECORD in train + held_out
  for record in train[:50]:
    terms = record["prompt"].rstrip("=").split("+")
    assert record["answer"] == str(sum(map(int, terms)))
  assert task.problems(1, 200) != (train, held_out)


@pytest.mark.parametrize(
  ("text", "in_form", "right"),
  [
    ("[16]", True, True),
    ("[17]", True, False),
    ("[]", False, False),
    ("16", False, False),
    ("[16]]", False, False),
    ("", False, False),
  ],
)
def test_answers_are_judged_like_they_are_rewarded(text, in_form, right):
  assert task.is_right(RECORD, text) is right
  functions = [rewards.function(entry) for entry in task.REWARDS]
  manager = RewardManager(functions, task.WEIGHTS)
  rewarded = manager.compute([RECORD["prompt"]], [text], {"answer": [RECORD["answer"]]})
  assert rewarded.total[0] == pytest.approx(1.0 * right + 0.1 * in_form)
  assert (rewarded.total[0] >= task.RIGHT) == right


def test_the_alphabet_holds_every_character():
  train, _ = task.problems(0, 1)
  used = {c for record in train for c in record["prompt"] + record["response"]}
  assert used == set(task.ALPHABET)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
  folder = tmp_path_factory.mktemp("data")
  return task.build_data(folder, seed=0, held_out=40)


@pytest.fixture(scope="module")
def tokenizer():
  return task.make_tokenizer()


def test_the_files_are_what_both_jobs_read(data):
  for suffix, count in (("", 960), ("_eval", 40)):
    assert JsonlRecords(data.path(f"sft{suffix}")).validate() == {"prompt": count}
    prompts = JsonlRecords(data.path(f"prompts{suffix}"), PROMPT_ROWS)
    columns = [read.extra.keys() for read in prompts.read()]
    assert columns == [{"answer"}] * count


def test_nothing_held_out_is_trained_on(data):
  trained = data.path("sft").read_text() + data.path("prompts").read_text()
  asked = [json.loads(line)["prompt"] for line in data.path("prompts_eval").open()]
  assert asked == [record["prompt"] for record in data.held_out]
  assert not any(f'"{prompt}"' in trained for prompt in asked)


def test_the_bytes_depend_on_the_seed_alone(tmp_path):
  one, again, other = (
    task.build_data(tmp_path / name, seed=seed, held_out=9)
    for name, seed in (("one", 0), ("again", 0), ("other", 1))
  )
  assert again.path("sft").read_bytes() == one.path("sft").read_bytes()
  assert other.held_out != one.held_out


def test_tokenizer_survives_saving(tokenizer, tmp_path):
  tokenizer.save(tmp_path)
  loaded = type(tokenizer).from_pretrained(tmp_path)
  assert loaded.vocab_size == tokenizer.vocab_size == 4 + len(task.ALPHABET)
  text = "1+2+3=[6]"
  assert loaded.decode(loaded.encode(text)) == text
  assert len(loaded.encode(text)) == len(text)
  roles = ("pad_id", "bos_id", "eos_id")
  assert [getattr(loaded, role)() for role in roles] == [0, 1, 2]


def test_answers_and_their_ends_are_what_is_trained(data, tokenizer):
  rows = pipeline.build_dataset(
    data.train[:1], tokenizer, batch_size=1, max_length=24, shuffle=False
  )
  batch = next(iter(rows))
  trained = batch["input_tokens"][supervision.trained_targets(batch)]
  shown = tokenizer.decode(trained, skip_special_tokens=False)
  assert shown == data.train[0]["response"] + "<end>"
