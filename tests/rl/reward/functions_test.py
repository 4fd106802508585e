import pickle

import pytest

from tests import toys_text
from tunix.rl.reward import functions as reward_fns
from tunix.rl.reward.rewards import RewardManager


def score(function, completions, references=None):
  columns = {} if references is None else {"answer": references}
  return function([""] * len(completions), completions, **columns)


def test_exact_match():
  found = score(reward_fns.exact_match(), [" yes\n", "Yes", "yes!"], ["yes"] * 3)
  assert found == [1.0, 0.0, 0.0]
  easy = reward_fns.exact_match(ignore_case=True)
  assert score(easy, ["YES"], ["yes"]) == [1.0]


def test_a_pattern_says_where_the_answer_is():
  # The last match counts, and of it the first group.
  tagged = reward_fns.exact_match(pattern=r"<a>(.*?)</a>")
  texts = ["<a>1</a>", "<a>2</a> no: <a>1</a>", "<a>1</a> or <a>2</a>", "1"]
  assert score(tagged, texts, ["1"] * 4) == [1.0, 1.0, 0.0, 0.0]
  assert score(reward_fns.exact_match(pattern=r"\d"), ["so 1."], [1]) == [1.0]


@pytest.mark.parametrize(
  ("text", "reference", "reward"),
  [
    ("so 5, or rather 1,234.50.", "1234.5", 1.0),
    *((f"the result is {minus}3", -3, 1.0) for minus in toys_text.MINUSES),
    *((f"the result is {minus}3", 3, 0.0) for minus in toys_text.MINUSES),
    ("pages 5\u20137", 7, 1.0),
    ("3e\u22122", "0.03", 1.0),
    ("8 is 5-3", 3, 1.0),
    ("I have 5, she 6", 6, 1.0),
    ("$1e3", "1,000", 1.0),
    ("none", 5, 0.0),
    ("4", 5, 0.0),
    ("0.5", "1/2", 1.0),
    ("9" * 2000, 5, 0.0),
  ],
)
def test_numeric_match(text, reference, reward):
  assert score(reward_fns.numeric_match(), [text], [reference]) == [reward]


def test_numeric_tolerances():
  texts, right = ["104", "106"], [100, 100]
  assert score(reward_fns.numeric_match(absolute=5), texts, right) == [1.0, 0.0]
  assert score(reward_fns.numeric_match(relative=0.05), texts, right) == [1.0, 0.0]
  assert score(reward_fns.numeric_match(relative=0.1), texts, right) == [1.0, 1.0]
  with pytest.raises(ValueError, match="absolute is"):
    reward_fns.numeric_match(absolute=-1)


def test_a_reference_that_is_no_number_is_a_failure():
  manager = RewardManager(reward_fns.numeric_match(), rows_per_call=1)
  out = manager.compute(["", ""], ["5", "5"], {"answer": ["five", "5"]})
  assert out.problems() == [
    line for line in out.problems() if "row 0: NotANumber: 'five'" in line
  ]
  assert list(out.valid) == [False, True]


def test_maths_match():
  texts = [r"so \boxed{\frac{1}{2}}", "0.5", r"\boxed{0.6}", "so 0.5"]
  assert score(reward_fns.maths_match(), texts, ["1/2"] * 4) == [1.0, 1.0, 0.0, 0.0]
  last = reward_fns.maths_match(pattern=r"answer is (.*)")
  assert score(last, [r"the answer is 2\sqrt{2}"], [r"\sqrt{8}"]) == [1.0]
  assert score(last, ["2"], ["2"]) == [0.0]
  assert score(reward_fns.maths_match(), ["3.1416"], [r"\pi"]) == [0.0]
  assert score(reward_fns.maths_match(relative=1e-4), ["3.1416"], [r"\pi"]) == [1.0]
  assert score(reward_fns.maths_match(), ["50%"], ["50"]) == [0.0]
  assert score(reward_fns.maths_match(ignore_percent=True), ["50%"], ["50"]) == [1.0]


def test_format_match():
  texts = ["<a>1\n2</a>\n", "so <a>1</a>", "1"]
  assert score(reward_fns.format_match("<a>.*</a>"), texts) == [1.0, 0.0, 0.0]
  part = reward_fns.format_match("<a>.*</a>", whole=False)
  assert score(part, texts) == [1.0, 1.0, 0.0]


def test_length_in_characters():
  # 1 - |n - 4| / 4
  texts = ["", "ab", "abcd", "abcdef", "a" * 9]
  assert score(reward_fns.length(target=4), texts) == [0.0, 0.5, 1.0, 0.5, 0.0]
  assert score(reward_fns.length(maximum=4), texts) == [1.0, 1.0, 1.0, 0.0, 0.0]
  for wrong in ({}, {"target": 1, "maximum": 1}, {"target": 0}):
    with pytest.raises(ValueError, match="target and maximum are"):
      reward_fns.length(**wrong)


def test_length_in_tokens():
  tokenizer = toys_text.chat_tokenizer("chatml")
  text = toys_text.WORDS[0]
  count = len(tokenizer.encode(text))
  assert count != len(text)
  by_tokens = reward_fns.length(target=count, tokenizer=tokenizer)
  assert score(by_tokens, [text]) == [1.0]
  assert score(pickle.loads(pickle.dumps(by_tokens)), [text]) == [1.0]


def test_json_schema():
  texts = ['{"a": 1}', '{"a": "1"}', "{", "[" * 100_000]
  schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
  assert score(reward_fns.json_schema(schema), texts) == [1.0, 0.0, 0.0, 0.0]
  assert score(reward_fns.json_schema(), texts) == [1.0, 1.0, 0.0, 0.0]
  fenced = reward_fns.json_schema(schema, pattern=r"```json(.*?)```")
  assert score(fenced, ['Look:\n```json\n{"a": 1}\n```', '{"a": 1}']) == [1.0, 0.0]
  with pytest.raises(ValueError, match="format"):
    reward_fns.json_schema({"format": "dat"})


READY = [
  reward_fns.exact_match("right", pattern="(.+)"),
  reward_fns.numeric_match("right"),
  reward_fns.maths_match("right"),
  reward_fns.format_match("[0-9]+"),
  reward_fns.length(maximum=3),
  reward_fns.json_schema({"type": "integer"}),
]


def test_all_run_in_workers_and_get_the_column_they_name():
  columns = {"right": ["12", "13"], "answer": ["x", "y"]}
  here = RewardManager(READY).compute(["", ""], ["12", "12"], columns)
  with RewardManager(READY, workers=2, timeout_s=60.0) as manager:
    there = manager.compute(["", ""], ["12", "12"], columns)
  assert there.outcomes == here.outcomes
  assert list(here.total) == [6.0, 3.0]  # three of them look at the column
  with pytest.raises(TypeError, match="exact_match needs 'right'"):
    RewardManager(READY).compute([""], ["12"], {"answer": ["12"]})


THOUGHT = "<think>\n3 or 4\n</think>\n\n"


@pytest.mark.parametrize(
  ("text", "answer"),
  [
    ("4", "4"),
    (THOUGHT + "4", "\n\n4"),
    ("3 or 4</think>4", "4"),  # the chat template opened the reasoning
    (THOUGHT + "</think>4", "4"),
    ("<think>3 or 4", None),
    (THOUGHT + "4<think>", None),
  ],
)
def test_the_answer_follows_the_reasoning(text, answer):
  assert reward_fns.after_reasoning(text) == answer
  columns = [text], ["4"]
  right = float(answer is not None)
  for make in (
    reward_fns.exact_match,
    reward_fns.numeric_match,
    reward_fns.maths_match,
  ):
    assert score(make(), *columns) == [right]
  assert score(reward_fns.json_schema(), [text]) == [right]


def test_reasoning_is_kept_on_request_and_by_what_rewards_the_form():
  texts, right = ["<think>3 or 4", THOUGHT + "4"], ["4", "4"]
  assert score(reward_fns.numeric_match(reasoning="keep"), texts, right) == [1.0, 1.0]
  assert score(reward_fns.exact_match(reasoning="keep"), texts, right) == [0.0, 0.0]
  form = "<think>.+</think>.+"
  assert score(reward_fns.format_match(form), texts) == [0.0, 1.0]
  assert score(reward_fns.format_match("[0-9]", reasoning="drop"), texts) == [0.0, 1.0]
  assert score(reward_fns.length(maximum=5), texts) == [0.0, 0.0]
  assert score(reward_fns.length(maximum=5, reasoning="drop"), texts) == [0.0, 1.0]
  with pytest.raises(ValueError, match="reasoning is 'skip'; expected 'drop' or"):
    reward_fns.exact_match(reasoning="skip")  # pyright: ignore[reportArgumentType]
