"""Reasoning that a template turns off is refused, stripped or kept."""

from typing import Any

import pytest

from tests import toys_text
from tests.toys_calls import MINISTRAL3, raw_tokenizer
from tunix.data.records import LABELLED, PAIRS, SFT
from tunix.data.rows import OneRow, SideBySide
from tunix.data.scan import scan
from tunix.data.source import Source
from tunix.data.turns import reasoning
from tunix.generate.tokenizer_adapter import TokenizerAdapter

QWEN3 = toys_text.chat_tokenizer("qwen3")
EMPTY = "<think>\n\n</think>\n\n"
# Trains the text of an answer, and not its end.
BLOCKS = TokenizerAdapter(
  raw_tokenizer(),
  chat_template="{% for m in messages %}<{{ m.role }}>{% if m.reasoning %}<think>"
  "{{ m.reasoning }}</think>{% endif %}{% if m.role == 'assistant' %}{% generation %}"
  "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}</s>"
  "{% endfor %}{% if add_generation_prompt %}<assistant><think></think>{% endif %}",
  bos_token="<s>",
  eos_token="</s>",
)
# Has other marks, and prints the content as it is.
MISTRAL = TokenizerAdapter(
  raw_tokenizer(),
  chat_template=MINISTRAL3
  + "{% if add_generation_prompt and enable_thinking is false %}[THINK][/THINK]"
  "{% endif %}",
  bos_token="<s>",
  eos_token="</s>",
)
ASK = {"role": "user", "content": "so ?"}


def answer(content="yes", **more):
  return {"role": "assistant", "content": content, **more}


THOUGHTS = [
  answer("<think>\nhm\n</think>\n\nyes"),
  answer("hm</think>yes"),
  answer(reasoning_content="hm"),
  answer(thinking="hm"),
]
CALLS = {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}


def source(
  record, tokenizer=QWEN3, kind=SFT, treatment: Any = "error", on=False, others=()
):
  layout = OneRow(max_length=200)
  if kind is not SFT:
    layout = SideBySide(max_prompt_length=100, max_completion_length=100)
  return Source(
    records=[record, *others],
    kind=kind,
    tokenizer=tokenizer,
    layout=layout,
    template_kwargs={"enable_thinking": on},
    reasoning=treatment,
  )


def trained(made):
  """The trained text of each completion."""
  row = made.render(0)
  tokenizer = made.tokenizer
  return [
    tokenizer.decode(ids[mask == 1], skip_special_tokens=False)
    for ids, mask in zip(row.completions, row.masks)
  ]


def records(message):
  yield SFT, {"messages": [ASK, message]}, ["yes<|im_end|>"]
  if set(message) == {"role", "content"}:
    yield SFT, {"prompt": "so ?", "response": message["content"]}, ["yes<|im_end|>"]
  rejected = message | {"content": message["content"].replace("yes", "no")}
  pair = {"prompt": [ASK], "chosen": [message], "rejected": [rejected]}
  yield PAIRS, pair, ["yes<|im_end|>", "no<|im_end|>"]
  labelled = {"prompt": [ASK], "completion": [message], "label": True}
  yield LABELLED, labelled, ["yes<|im_end|>"]


@pytest.mark.parametrize("message", THOUGHTS)
def test_reasoning_that_no_sample_has(message):
  for kind, record, plain in records(message):
    with pytest.raises(ValueError, match=r"record 0: messages\[1\] holds reasoning"):
      scan(source(record, kind=kind))
    made = source(record, kind=kind, treatment="strip")
    assert trained(made) == plain
    report = scan(made)
    assert report.stripped == 1 and "1 without their reasoning" in str(report)
    kept = source(record, kind=kind, treatment="keep")
    assert "hm" in trained(kept)[0] and scan(kept).stripped == 0
    on = source(record, kind=kind, on=True)
    assert "hm" in trained(on)[0] and scan(on).stripped == 0


@pytest.mark.parametrize(
  "message",
  [
    answer("<think>\nhm"),
    answer("<think>hm</think>"),
    answer("hm</think>\n"),
    answer("", reasoning="hm"),
  ],
)
@pytest.mark.parametrize("tokenizer", [QWEN3, BLOCKS])
def test_nothing_but_reasoning_is_an_empty_answer(message, tokenizer):
  kept = {"messages": [ASK, answer(reasoning_content="hm"), ASK, answer()]}
  record = {"messages": [ASK, message]}
  made = source(record, tokenizer, treatment="strip", others=[kept])
  report = scan(made)
  assert (report.kept, report.empty) == (1, 1)
  assert "1 with an empty completion left out" in str(report)
  assert made.element(0) is None
  with pytest.raises(
    ValueError, match="the only scanned record is nothing but reasoning, or"
  ):
    scan(source(record, tokenizer, treatment="strip"))
  pair = {"prompt": [ASK], "chosen": [answer()], "rejected": [message]}
  with pytest.raises(ValueError, match='record 0: "rejected" is empty'):
    scan(source(pair, tokenizer, kind=PAIRS, treatment="strip"))


def test_calls_after_reasoning_are_an_answer():
  record = {"messages": [ASK, answer("", reasoning_content="hm") | CALLS]}
  report = scan(source(record, treatment="strip"))
  assert (report.kept, report.stripped) == (1, 1)


def test_other_marks():
  record = {"messages": [ASK, answer(reasoning_content="hm")]}
  with pytest.raises(ValueError, match=r"the generation prompt ends with '\[/THINK\]'"):
    scan(source(record, MISTRAL))
  assert trained(source(record, MISTRAL, treatment="strip")) == ["yes</s>"]
  record = {"messages": [ASK, answer("[THINK]hm[/THINK]yes")]}
  assert trained(source(record, MISTRAL, treatment="strip")) == ["yes</s>"]


def test_earlier_turns():
  thought = answer(reasoning_content="hm")
  # The template drops the reasoning of turns before the last question.
  dropped = {"messages": [ASK, thought, ASK, answer()]}
  assert scan(source(dropped)).stripped == 0
  shown = {
    "messages": [ASK, thought | CALLS, {"role": "tool", "content": "3"}, answer()]
  }
  with pytest.raises(ValueError, match=r"messages\[1\] holds reasoning"):
    scan(source(shown))
  assert scan(source(shown, treatment="strip")).stripped == 1
  context = {"messages": [ASK, thought | CALLS | {"train": False}, ASK, answer()]}
  assert scan(source(context)).stripped == 0


@pytest.mark.parametrize(
  "message",
  [
    answer(),
    answer(EMPTY + "yes"),
    answer("see <think> and </think>"),
    answer(reasoning_content=" ", thinking=None),
    {"role": "assistant"},
  ],
)
def test_a_message_without_reasoning_is_returned_itself(message):
  assert reasoning.without(message) is message
