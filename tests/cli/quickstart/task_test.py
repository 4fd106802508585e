"""Sums, what counts as right, and that the rewards of the configuration agree."""

import pytest

from tunix.cli import rewards
from tunix.cli.quickstart import task
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
  assert task.in_form(text) is in_form
  assert task.is_right(RECORD, text) is right
  functions = [rewards.function(entry) for entry in task.REWARDS]
  manager = RewardManager(functions, task.WEIGHTS)
  found = manager.compute([RECORD["prompt"]], [text], {"answer": [RECORD["answer"]]})
  assert found.total[0] == pytest.approx(1.0 * right + 0.1 * in_form)
  assert (found.total[0] >= task.RIGHT) == right


def test_the_alphabet_holds_every_character():
  train, _ = task.problems(0, 1)
  used = {c for record in train for c in record["prompt"] + record["response"]}
  assert used == set(task.ALPHABET)
