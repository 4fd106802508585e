import numpy as np
import pytest

from tests import toys_text
from tunix.data import forms, records as kinds
from tunix.data.records import ANSWERED, LABELLED, PAIRS, PROMPT_ROWS, PROMPTS, SFT
from tunix.data.render import render_record
from tunix.data.rows import OneRow
from tunix.data.scan import scan
from tunix.data.source import Source

CHAT = toys_text.chat_tokenizer("chatml")
PLAIN = toys_text.chat_tokenizer(None)


def user(text):
  return {"role": "user", "content": text}


def model(text, **more):
  return {"role": "assistant", "content": text, **more}


SAME = [
  # kind, as others have it, as we have it
  (
    SFT,
    {"instruction": "Add.", "input": "2 and 3", "output": "Five.", "text": "Below ..."},
    {"prompt": "Add.\n\n2 and 3", "response": "Five."},
  ),
  (
    SFT,
    {"instruction": "Add.", "input": "", "output": "Five."},
    {"prompt": "Add.", "response": "Five."},
  ),
  (
    SFT,
    {
      "conversations": [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello"},
      ]
    },
    {"messages": [{"role": "system", "content": "s"}, user("Hi"), model("Hello")]},
  ),
  (
    SFT,
    {"conversations": [{"from": "human", "value": "Hi"}, model("a")], "system": "s"},
    {"messages": [{"role": "system", "content": "s"}, user("Hi"), model("a")]},
  ),
  (
    SFT,
    {
      "instruction": "c",
      "output": "d",
      "system": "s",
      "history": [["a", "b"]],
    },
    {
      "messages": [
        {"role": "system", "content": "s"},
        *(user("a"), model("b"), user("c"), model("d")),
      ]
    },
  ),
  (
    SFT,
    {"instruction": "a", "output": "b", "system": "", "history": []},
    {"prompt": "a", "response": "b"},
  ),
  (
    PAIRS,
    {"instruction": "a", "system": "s", "chosen": "b", "rejected": "c"},
    {
      "prompt": [{"role": "system", "content": "s"}, user("a")],
      "chosen": "b",
      "rejected": "c",
    },
  ),
  (
    LABELLED,
    {"instruction": "a", "output": "b", "kto_tag": False},
    {"prompt": "a", "completion": "b", "label": False},
  ),
  (
    LABELLED,
    {
      "conversations": [
        {"from": "human", "value": "a"},
        {"from": "gpt", "value": "b"},
      ],
      "kto_tag": True,
    },
    {"prompt": [user("a")], "completion": [model("b")], "label": True},
  ),
  (SFT, {"prompt": "Hi", "completion": "Hello"}, {"prompt": "Hi", "response": "Hello"}),
  (
    SFT,
    {"prompt": [user("a"), model("b"), user("c")], "completion": [model("d")]},
    {"messages": [user("a"), model("b", train=False), user("c"), model("d")]},
  ),
  (
    SFT,
    {"prompt": "Hi", "prompt_id": 3, "messages": [user("Hi"), model("Hello")]},
    {"messages": [user("Hi"), model("Hello")]},
  ),
  (
    SFT,
    {
      "messages": [user([{"type": "text", "text": "H"}, {"type": "text", "text": "i"}])]
      + [model("Hello")]
    },
    {"messages": [user("Hi"), model("Hello")]},
  ),
  (
    ANSWERED,
    {"conversations": [{"from": "user", "value": "Hi"}, {"from": "bot", "value": "a"}]},
    {"messages": [user("Hi"), model("a")]},
  ),
  (
    PAIRS,
    {"instruction": "Add.", "input": "2", "chosen": "Two.", "rejected": "Six."},
    {"prompt": "Add.\n\n2", "chosen": "Two.", "rejected": "Six."},
  ),
  (
    PAIRS,
    {
      "conversations": [{"from": "human", "value": "Hi"}],
      "chosen": {"from": "gpt", "value": "Hello"},
      "rejected": {"from": "gpt", "value": "No"},
    },
    {"prompt": [user("Hi")], "chosen": [model("Hello")], "rejected": [model("No")]},
  ),
  (
    LABELLED,
    {"instruction": "Add.", "completion": "Two.", "label": True},
    {"prompt": "Add.", "completion": "Two.", "label": True},
  ),
  (PROMPTS, {"instruction": "Add."}, {"prompt": "Add."}),
  (
    PROMPTS,
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"prompt": [user("a")]},
  ),
]


@pytest.mark.parametrize(("kind", "theirs", "ours"), SAME)
def test_records_of_others_are_read_as_ours(kind, theirs, ours):
  """The same tokens and mask."""
  before = repr(theirs)
  left, right = (render_record(x, kind, CHAT, where="w") for x in (theirs, ours))
  assert repr(theirs) == before  # the caller's record is not changed
  np.testing.assert_array_equal(left.prompt, right.prompt)
  assert len(left.completions) == len(kind.completions)
  for mine, yours in zip(
    (*left.completions, *left.masks), (*right.completions, *right.masks)
  ):
    np.testing.assert_array_equal(mine, yours)
  assert forms.find(ours, *kind.forms) is None


def test_what_came_before_the_completion_is_not_learned():
  theirs = {
    "prompt": [user("a"), model("sea"), user("c")],
    "completion": [model("mill")],
  }
  rendered = render_record(theirs, SFT, CHAT, where="w")
  [ids], [mask] = rendered.completions, rendered.masks
  assert CHAT.decode(ids[mask != 0]).strip() == "mill"


def test_prompts_of_rewards_may_have_parts():
  record = {"prompt": [user([{"type": "text", "text": "Hi"}])], "answer": "3"}
  read = PROMPT_ROWS.read(record, "w")
  assert read.prompt == [user("Hi")] and read.extra == {"answer": "3"}


@pytest.mark.parametrize(
  ("kind", "record", "message"),
  [
    (
      SFT,
      {"instruction": "", "output": "x"},
      "w: \"instruction\" is '', expected te",
    ),
    (SFT, {"instruction": "a", "input": 3, "output": "x"}, 'w: "input" is 3, expected'),
    (SFT, {"instruction": "a", "output": 3}, 'w: "response" is an int'),
    (SFT, {"conversations": "x"}, 'w: "conversations" is'),
    (
      SFT,
      {"instruction": "a", "output": "b", "history": [["a"]]},
      r'w: "history"\[0\] is \[\'a\'\], expected \[question, answer\]',
    ),
    (
      SFT,
      {"conversations": [{"from": "function_call", "value": "x"}]},
      r'w: "conversations"\[0\] is no JSON',
    ),
    (
      SFT,
      {"conversations": [{"from": "human", "value": "x"}], "tools": "x"},
      'w: "tools" is no JSON',
    ),
    (
      SFT,
      {"conversations": [{"from": "alien", "value": "x"}]},
      r'w: "conversations"\[0\]: "from" is \'alien\', expected one of human, user, gpt',
    ),
    (SFT, {"conversations": [3]}, r'w: "conversations"\[0\] is 3, expected {"from"'),
    (
      SFT,
      {"prompt": "a", "completion": [model("b")]},
      'w: "prompt" is a str and "comp',
    ),
    (
      SFT,
      {"messages": [user([{"type": "image"}])]},
      "1 placeholders of images and 0 images in the columns",
    ),
    (
      PAIRS,
      {"conversations": [], "chosen": "a", "rejected": "b"},
      '"conversations" is',
    ),
  ],
)
def test_wrong_records_are_named(kind, record, message):
  with pytest.raises(ValueError, match=message):
    kind.read(record, "w")


def test_a_scan_says_what_was_recognized():
  records = [{"instruction": "a", "output": "b"}, {"prompt": "a", "completion": "b"}]
  source = Source(
    records=records, kind=SFT, tokenizer=PLAIN, layout=OneRow(max_length=20)
  )
  report = scan(source)
  assert report.forms == ["Alpaca", "TRL"]
  assert "read as Alpaca and TRL have them" in str(report)
  ours = Source(
    records=[{"prompt": "a", "response": "b"}],
    kind=SFT,
    tokenizer=PLAIN,
    layout=OneRow(max_length=20),
  )
  assert "read as" not in str(scan(ours))


def test_every_kind_says_what_it_takes():
  assert {
    kind.name: {form.name for form in kind.forms} for kind in kinds.KINDS.values()
  } == {
    "sft": {"Alpaca", "ShareGPT", "TRL"},
    "pair": {"Alpaca", "OpenAI", "ShareGPT"},
    "labelled": {"Alpaca", "ShareGPT"},
    "answered": {"Alpaca", "ShareGPT", "TRL"},
    "prompt": {"Alpaca", "ShareGPT"},
    "prompt with columns": set(),
  }


def test_calls_and_tools_that_are_written_as_text_are_read():
  turns = [
    {"from": "human", "value": "a"},
    {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
    {"from": "observation", "value": "3"},
  ]
  record = {"conversations": turns, "tools": '[{"type": "function"}]', "system": "s"}
  read = SFT.read(record, "w")
  assert read.tools == [{"type": "function"}]
  system, question, call, result = read.completions["completion"]
  assert [system["role"], question["role"], result["role"]] == [
    "system",
    "user",
    "tool",
  ]
  assert call["tool_calls"] == [
    {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
  ]
