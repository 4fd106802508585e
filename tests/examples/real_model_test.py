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
  import tickets

  sys.path.remove(str(FOLDER))
  return tickets, pairs


def test_tickets_are_repeated_and_held_out_ones_are_new(scripts):
  tickets, _ = scripts
  made = tickets.records(500, seed=0)
  assert made == tickets.records(500, seed=0)
  texts = [record["prompt"][1]["content"] for record in made]
  assert len(set(texts)) == 500
  for text, record in zip(texts, made, strict=True):
    fields = json.loads(record["response"])
    assert all(fields[key] in text for key in ("name", "order", "product"))
    assert fields["problem"] in tickets.PROBLEMS and fields["wish"] in tickets.WISHES


def test_the_share_of_exact_fields(scripts):
  tickets, _ = scripts
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
  _, pairs = scripts
  fields = {"name": "Ana Diaz", "order": "A123", "product": "tent"}
  replies = ["Dear ANA, your tent of order A123 is on its way.", "Sorry.", ""]
  replies.append(" ".join(["ana"] * 41))
  assert pairs.rule([], replies, [fields] * 4) == [1, 0.25, 0, 0.25]


@pytest.mark.parametrize("job", ["sft", "grpo", "dpo"])
def test_the_settings_are_those_of_their_jobs(job):
  config = config_lib.load([str(FOLDER / f"{job}.yaml"), "--model.path=smollm2"])
  assert config.job == job and config.lora.rank == 16
