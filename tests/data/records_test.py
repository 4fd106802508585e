import pytest

from tunix.data import records as record_kinds
from tunix.data.reading import jsonl
from tunix.data.records import (
  LABELLED,
  PAIRS,
  PROMPT_ROWS,
  SFT,
  read_labelled,
  read_pair,
  read_prompt,
)


def user(text):
  return {"role": "user", "content": text}


def model(text):
  return {"role": "assistant", "content": text}


def test_text_with_a_prompt():
  read = read_pair({"prompt": "a", "chosen": "b", "rejected": "c", "id": 7}, "w")
  assert read == ("pair", "a", {"chosen": "b", "rejected": "c"}, {}, None)


def test_margin_and_tools_are_kept():
  record = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 2, "tools": []}
  read = read_pair(record, "w")
  assert read.extra == {"margin": 2.0}
  assert read.tools == []


def test_whole_conversations_are_cut_where_they_part():
  start = [{"role": "system", "content": "s"}, user("q")]
  record = {
    "chosen": [*start, model("good"), user("more"), model("better")],
    "rejected": [*start, model("bad")],
  }
  read = read_pair(record, "w")
  assert read.prompt == start
  assert read.completions["chosen"] == [model("good"), user("more"), model("better")]
  assert read.completions["rejected"] == [model("bad")]


def test_a_common_first_answer_belongs_to_the_prompt():
  start = [user("q"), model("both"), user("and?")]
  record = {"chosen": [*start, model("x")], "rejected": [*start, model("y")]}
  assert read_pair(record, "w").prompt == start


def test_equal_conversations_keep_an_answer_each():
  whole = [user("q"), model("x")]
  read = read_pair({"chosen": whole, "rejected": list(whole)}, "w")
  assert read.prompt == [user("q")]
  assert read.completions == {"chosen": [model("x")], "rejected": [model("x")]}


@pytest.mark.parametrize("prompt", ["q", [user("q")]])
def test_a_prompt_that_the_conversations_repeat(prompt):
  record = {
    "prompt": prompt,
    "chosen": [user("q"), model("x")],
    "rejected": [user("q"), model("y")],
  }
  read = read_pair(record, "w")
  assert read.prompt == [user("q")]
  assert read.completions["chosen"] == [model("x")]


def test_answers_as_messages_behind_a_prompt():
  record = {"prompt": [user("q")], "chosen": [model("x")], "rejected": [model("y")]}
  read = read_pair(record, "w")
  assert read.completions == {"chosen": [model("x")], "rejected": [model("y")]}


def test_labelled():
  read = read_labelled({"prompt": "a", "completion": "b", "label": False}, "w")
  assert read == ("labelled", "a", {"completion": "b"}, {"label": False}, None)
  whole = {"completion": [user("q"), model("x")], "label": True}
  assert read_labelled(whole, "w").prompt == [user("q")]


@pytest.mark.parametrize(
  ("record", "message"),
  [
    ([], "found a list, expected"),
    ({"prompt": "a", "chosen": "b"}, "found fields 'prompt', 'chosen', expected"),
    ({"chosen": "b", "rejected": "c"}, 'no "prompt", and "chosen" and "rejected"'),
    ({"prompt": 3, "chosen": "b", "rejected": "c"}, '"prompt" is an int'),
    ({"prompt": "a", "chosen": 1, "rejected": "c"}, '"chosen" is an int'),
    ({"prompt": "a", "chosen": [], "rejected": "c"}, '"chosen" is an empty list'),
    (
      {"prompt": "a", "chosen": [{"role": "user"}], "rejected": "c"},
      r'"chosen"\[0\]: "content" is missing',
    ),
    (
      {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "much"},
      "\"margin\" is 'much', expected a finite number",
    ),
    (
      {"chosen": [user("a"), model("x")], "rejected": [user("b"), model("x")]},
      "no common first message",
    ),
    (
      {
        "prompt": "other",
        "chosen": [user("a"), model("x")],
        "rejected": [user("a"), model("y")],
      },
      'do not begin with "prompt"',
    ),
    (
      {"prompt": "a", "chosen": [user("a"), model("x")], "rejected": "y"},
      '"chosen" is a whole conversation',
    ),
  ],
)
def test_wrong_pairs(record, message):
  with pytest.raises(ValueError, match=f"^file:3: .*{message}"):
    read_pair(record, "file:3")


@pytest.mark.parametrize(
  ("record", "message"),
  [
    ({"prompt": "a", "completion": "b"}, '"label" is None, expected true'),
    ({"prompt": "a", "completion": "b", "label": 1}, '"label" is 1, expected true'),
    ({"prompt": "a", "label": True}, "found fields 'prompt', 'label', expected"),
  ],
)
def test_wrong_labelled_records(record, message):
  with pytest.raises(ValueError, match=f"^file:3: .*{message}"):
    read_labelled(record, "file:3")


def test_a_null_is_no_field_but_a_column_of_rewards():
  record = {"prompt": None, "prompts": "a", "response": None, "x": None}
  extra = {"response": None, "x": None}
  assert PROMPT_ROWS.read(record, "w") == ("prompt", "a", {}, extra, None)
  with pytest.raises(ValueError, match=r"^w: found fields 'prompt' \(null\), 'x', exp"):
    PROMPT_ROWS.read({"prompt": None, "x": 1}, "w")
  pair = {"chosen": [user("q"), model("x")], "rejected": [user("q"), model("y")]}
  assert read_pair(pair | {"prompt": None, "margin": None}, "w").prompt == [user("q")]


def test_prompts():
  read = read_prompt({"prompt": "a", "response": 3}, "w")
  assert read == ("prompt", "a", {}, {}, None)
  chat = [user("a"), model("x"), user("b")]
  for messages in (chat, [*chat, model("y")]):
    assert read_prompt({"messages": messages}, "w").prompt == chat
  read = read_prompt({"prompt": chat, "tools": []}, "w")
  assert read == ("prompt", chat, {}, {}, [])


@pytest.mark.parametrize(
  ("record", "message"),
  [
    ({"text": "a"}, "found fields 'text', expected"),
    ({"prompt": "a", "messages": [user("a")]}, "found fields 'prompt', 'messages'"),
    ({"prompt": 3}, '"prompt" is an int'),
    ({"prompt": []}, '"prompt" is an empty list'),
    ({"messages": "a"}, '"messages" is a str'),
    ({"messages": [model("x")]}, "the only message is an answer"),
  ],
)
def test_wrong_prompts(record, message):
  with pytest.raises(ValueError, match=f"^file:3: .*{message}"):
    read_prompt(record, "file:3")


def test_files_are_checked_by_their_form(tmp_path):
  file = tmp_path / "pairs.jsonl"
  file.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n\n{"text": "a"}\n')
  records = jsonl.JsonlRecords(file, PAIRS)
  assert records[0]["chosen"] == "b"
  with pytest.raises(ValueError, match=r"pairs.jsonl:3: found fields 'text', expected"):
    records.validate()
  file.write_text('{"prompt": "a", "completion": "b", "label": true}\n')
  assert jsonl.JsonlRecords(file, LABELLED).validate() == {"labelled": 1}


@pytest.mark.parametrize(
  ("response", "empty"),
  [
    ("", True),
    (" \n", True),
    ("a", False),
    ([model(" ")], True),
    ([model("a")], False),
    ([{"role": "assistant", "content": None, "tool_calls": [{}]}], False),
  ],
)
def test_what_says_nothing(response, empty):
  assert record_kinds.is_empty(response) is empty


def test_a_pair_is_none_of_fine_tuning():
  pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
  with pytest.raises(ValueError, match=r"^x: the record is a pair .* job dpo, orpo"):
    SFT.read(pair, "x")
  assert SFT.read({**pair, "response": "d"}, "x").completions == {"completion": "d"}


def test_both_completions_of_a_pair_have_one_form():
  answer = [{"role": "assistant", "content": "b"}]
  for chosen, rejected in ((answer, "c"), ("c", answer)):
    pair = {"prompt": "a", "chosen": chosen, "rejected": rejected}
    with pytest.raises(
      ValueError, match=r'^x: "chosen" is a .* and "rejected" is a .*; exp'
    ):
      PAIRS.read(pair, "x")
