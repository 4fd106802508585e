"""examples/real_model: the data, the rules, and the settings of its three runs."""

import json
import sys

import pytest

from tests.examples.loading import EXAMPLES
from tunix.cli import config as config_lib

FOLDER = EXAMPLES / "real_model"


@pytest.fixture(scope="module")
def scripts():
  sys.path.insert(0, str(FOLDER))
  import pairs
  import tasks
  import tickets

  sys.path.remove(str(FOLDER))
  return tickets, pairs, tasks


def test_tickets_are_repeated_and_held_out_ones_are_new(scripts):
  tickets, *_ = scripts
  made = tickets.records(500, seed=0)
  assert made == tickets.records(500, seed=0)
  texts = [record["prompt"][1]["content"] for record in made]
  assert len(set(texts)) == 500
  for text, record in zip(texts, made, strict=True):
    fields = json.loads(record["response"])
    assert all(fields[key] in text for key in ("name", "order", "product"))
    assert fields["problem"] in tickets.PROBLEMS and fields["wish"] in tickets.WISHES


def test_the_share_of_exact_fields(scripts):
  tickets, *_ = scripts
  right = {"name": "Ana Diaz", "order": "A1", "product": "tent"}
  cases = {
    json.dumps(right): 1,
    f"Here it is: {json.dumps(right | {'order': 'A2', 'more': 1})}.": 2 / 3,
    '{"name": "ana diaz"}': 0,
    "[1]": 0,
    "no object": 0,
    '{"name": ': 0,
  }
  found = tickets.exact_fields([], list(cases), [json.dumps(right)] * len(cases))
  assert found == pytest.approx(list(cases.values()))


def test_the_points_of_a_reply(scripts):
  _, pairs, _ = scripts
  fields = {"name": "Ana Diaz", "order": "A123", "product": "tent"}
  replies = ["Dear ANA, your tent of order A123 is on its way.", "Sorry.", ""]
  replies.append(" ".join(["ana"] * 41))
  assert pairs.rule([], replies, [fields] * 4) == [1, 0.25, 0, 0.25]


@pytest.mark.parametrize(
  ("file", "job"), [("sft", "sft"), ("sums", "sft"), ("grpo", "grpo"), ("dpo", "dpo")]
)
def test_the_settings_are_those_of_their_jobs(file, job):
  config = config_lib.load([str(FOLDER / f"{file}.yaml"), "--model.path=smollm2"])
  assert config.job == job and config.lora.rank == 16


@pytest.mark.long  # CI has the library after the quick tests
def test_tasks_are_written_with_their_answers(scripts, tmp_path):
  pytest.importorskip("reasoning_gym")
  file = tmp_path / "sums.jsonl"
  scripts[2].write(file, "chain_sum(max_terms=2, max_digits=2)", 3)
  rows = [json.loads(line) for line in file.read_text().splitlines()]
  assert len(rows) == 3
  for row in rows:
    question = row["prompt"].rpartition(": ")[2].removesuffix(" =")
    left, sign, right = question.split()
    assert int(row["response"]) == int(left) + int(f"{sign}{right}")
