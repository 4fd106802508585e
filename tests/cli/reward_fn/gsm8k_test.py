import pytest

from tests import toys_text
from tunix.cli.reward_fn import gsm8k
from tunix.rl.reward.rewards import RewardManager


def text(answer, before="", after=""):
  return f"{before}<reasoning>because\nof</reasoning>\n<answer>{answer}</answer>{after}"


@pytest.mark.parametrize(
  ("completion", "exactly", "approximately"),
  [
    (text("5"), 3.0, 2.0),
    (text("5", after="\n"), 3.0, 2.0),
    (text("5", before="So: "), 0.0, 2.0),
    (text("5") + text("6"), 0.0, -2.0),
    ("<answer>5</answer>", 0.0, 0.0),
    ("5", 0.0, -2.0),
  ],
)
def test_form(completion, exactly, approximately):
  assert gsm8k.match_format_exactly([""], [completion]) == [exactly]
  assert gsm8k.match_format_approximately([""], [completion]) == [approximately]


@pytest.mark.parametrize(
  ("completion", "answer", "number"),
  [
    (text("100"), 3.0, 1.5),
    (text(" $100.00 "), 3.0, 1.5),
    (text("109"), 0.5, 0.0),
    (text("85"), 0.25, 0.0),
    (text("10"), -1.0, 0.0),
    *((text(f"{minus}100"), -1.0, 0.0) for minus in toys_text.MINUSES),
    (text("many"), -1.0, 0.0),
    (text("100 apples"), -1.0, 1.5),
    ("<answer>100", 0.0, 1.5),
    ("100", 0.0, 0.0),
  ],
)
def test_number(completion, answer, number):
  assert gsm8k.check_answer([""], [completion], ["100"]) == [answer]
  assert gsm8k.check_numbers([""], [completion], ["100"]) == [number]


def test_the_four_together_in_a_worker():
  functions = [
    gsm8k.match_format_exactly,
    gsm8k.match_format_approximately,
    gsm8k.check_answer,
    gsm8k.check_numbers,
  ]
  with RewardManager(functions, workers=1, timeout_s=60.0) as manager:
    out = manager.compute([""], [text("1,000")], {"answer": ["1000"]})
  assert list(out.total) == [3.0 + 2.0 + 3.0 + 1.5]
