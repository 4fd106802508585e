"""Tool calls are trained, under templates built like those of many models."""

import json
import random
import re

import numpy as np
import pytest

from tests import toys_text
from tests.toys_calls import TEMPLATES, raw_tokenizer, tokenizer_of
from tunix.data import chat, show
from tunix.data.records import SFT
from tunix.data.turns import trained_spans
from tunix.generate.tokenizer_adapter import TokenizerAdapter

WITH_CALLS = [name for name, entry in TEMPLATES.items() if "no_calls" not in entry[3]]
# What the variables of the templates print around the text of each assistant's turn.
MARKS = {"open": "\ue010", "close": "\ue011"}


def text(rng):
  words = " ".join(toys_text.WORDS).split()
  extra = ['{"a": 1}}', "}", "\n", "user", "assistant", "<tool_call>", '"']
  chosen = [rng.choice(extra if rng.random() < 0.2 else words) for _ in range(4)]
  return " ".join(chosen).strip() or "yes"


def arguments(rng, accepts):
  if "text" in accepts and rng.random() < 0.2:
    return json.dumps({"a": text(rng)})
  value = rng.choice([1, "", text(rng), {"b": [1, {}]}, None])
  return rng.choice([{}, {"a": value}, {"a": 1, "name": value}])


def answers(rng, accepts):
  """Messages from one question to its answer."""
  messages = []
  for _ in range(rng.choice([0, 1, 1, 2]) if "no_calls" not in accepts else 0):
    count = rng.choice([1, 2, 3]) if "parallel" in accepts else 1
    calls = [
      {
        "id": f"{rng.randrange(10**9):09d}",
        "type": "function",
        "function": {
          "name": rng.choice(["add", "f", "search"]),
          "arguments": arguments(rng, accepts),
        },
      }
      for _ in range(count)
    ]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    if "beside" in accepts and rng.random() < 0.4:
      message["content"] = text(rng)
    elif "thinking" in accepts and rng.random() < 0.6:
      message["reasoning_content"] = text(rng)
    results = [
      {"role": "tool", "content": text(rng), "tool_call_id": call["id"]}
      for call in calls
    ]
    messages += [message, *results]
  last = {"role": "assistant", "content": text(rng) if rng.random() < 0.9 else ""}
  if "thinking" in accepts and rng.random() < 0.5:
    last["reasoning_content"] = text(rng)
  return [*messages, last]


def conversation(rng, accepts, rounds=None):
  messages = []
  if "system" in accepts and rng.random() < 0.5:
    messages.append({"role": "system", "content": text(rng)})
  for _ in range(rounds or rng.choice([1, 1, 2, 3, 5])):
    messages += [{"role": "user", "content": text(rng)}, *answers(rng, accepts)]
  for message in messages:
    if message["role"] == "assistant" and rng.random() < 0.1:
      message["weight"] = 0
  messages[-1].pop("weight", None)
  return messages


def expected(messages, tokenizer, **variables):
  """The rendered conversation, and the text of each trained turn."""
  visible = [{k: v for k, v in m.items() if k != "weight"} for m in messages]

  def render(**marks):
    return tokenizer.apply_chat_template(
      visible, False, now=chat.TEMPLATE_DATE, **variables, **marks
    )

  turns = re.findall("\ue010(.*?)\ue011", render(**MARKS), re.DOTALL)
  weights = [m.get("weight", 1) for m in messages if m["role"] == "assistant"]
  assert len(turns) == len(weights)
  return render(), [turn for turn, weight in zip(turns, weights) if weight]


def runs(row, tokenizer):
  """Texts of the runs of trained tokens."""
  borders = np.flatnonzero(np.diff(row.mask)) + 1
  parts = zip(np.split(row.tokens, borders), np.split(row.mask, borders))
  return [tokenizer.decode(t, skip_special_tokens=False) for t, m in parts if m[0]]


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_turn_is_trained_once_and_nothing_else(name):
  tokenizer, accepts = tokenizer_of(name), TEMPLATES[name][3]
  for seed in range(40):
    rng = random.Random(f"{name} {seed}")
    messages = conversation(rng, accepts)
    tools = [{"type": "function", "function": {"name": "add"}}]
    full, turns = expected(messages, tokenizer, tools=tools)
    row = chat.render({"messages": messages, "tools": tools}, tokenizer)
    if name == "glm4":
      full, turns[-1] = full + "<|endoftext|>", turns[-1] + "<|endoftext|>"
    assert tokenizer.decode(row.tokens, skip_special_tokens=False) == full
    found = runs(row, tokenizer)
    assert found == turns, (seed, messages)


@pytest.mark.parametrize("name", WITH_CALLS)
def test_a_call_ends_with_its_token(name):
  tokenizer = tokenizer_of(name)
  call = {"function": {"name": "f", "arguments": {"n": 1}}, "id": "123456789"}
  messages = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": [call]},
  ]
  row = chat.render({"messages": messages}, tokenizer)
  ends = {"llama31": "<|eom_id|>", "gpt_oss": "<|call|>"}
  [trained] = runs(row, tokenizer)
  assert trained.rstrip().endswith(ends.get(name, TEMPLATES[name][2]))
  assert '"n": 1' in trained and "f" in trained


@pytest.mark.parametrize("name", WITH_CALLS)
def test_long_conversations_with_calls_are_rendered_a_fixed_number_of_times(name):
  tokenizer = tokenizer_of(name)

  def count(rounds):
    messages, calls = [], [0]
    for n in range(rounds):
      call = {"function": {"name": "f", "arguments": {"n": n}}, "id": "123456789"}
      messages += [
        {"role": "user", "content": f"a {n}"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": f"{n}", "tool_call_id": "123456789"},
        {"role": "assistant", "content": f"it is {n}"},
      ]

    def render(some, add_generation_prompt):
      calls[0] += 1
      return tokenizer.apply_chat_template(
        some, add_generation_prompt, now=chat.TEMPLATE_DATE
      )

    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    closing = list(tokenizer.special_tokens())
    trained_spans.find_segments(messages, turns, render, closing)
    return calls[0]

  assert count(8) == count(16) <= 24


def test_a_call_that_is_not_printed_is_an_error():
  tokenizer = tokenizer_of("gemma3")
  call = {"function": {"name": "f", "arguments": {"n": 1}}}
  messages = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "", "tool_calls": [call]},
  ]
  message = r"d\.jsonl:3: the chat template prints .* tool calls of messages\[3\]"
  for content in ("", "let me see if"):
    messages[3]["content"] = content
    with pytest.raises(ValueError, match=message):
      chat.render({"messages": messages}, tokenizer, where="d.jsonl:3")
  messages[3]["train"] = False
  assert runs(chat.render({"messages": messages}, tokenizer), tokenizer) == [
    "b<end_of_turn>"
  ]


def closings(template, messages, **tokens):
  """Texts of the trained runs under a template with the tokens of `raw_tokenizer`."""
  tokenizer = TokenizerAdapter(raw_tokenizer(), chat_template=template, **tokens)
  return runs(chat.render({"messages": messages}, tokenizer), tokenizer)


EACH = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
QA = [
  {"role": "user", "content": "a"},
  {"role": "assistant", "content": "b"},
  {"role": "user", "content": "c"},
  {"role": "assistant", "content": "d"},
]


@pytest.mark.parametrize(
  ("template", "expected"),
  [
    # The token that ends the conversation closes no turn.
    (EACH + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}" + PROMPT, ""),
    # The header of an answer is printed even where none is asked for.
    (EACH + "<|assistant|>", ""),
    # White space and further tokens before the next header belong to the turn.
    (EACH.replace("<|end|>", "<|end|>\n<|return|>\n") + PROMPT, "\n<|return|>"),
    # Every turn closes differently at the end of the conversation.
    (
      EACH.replace("<|end|>", "{{ '<|end|>' if loop.last else '<|return|>' }}")
      + "<|endoftext|>",
      None,
    ),
  ],
)
def test_only_tokens_that_close_every_turn_are_trained(template, expected):
  tokens = {"eos_token": "<|end|>"}
  ends = (
    ["<|end|>" + expected] * 2 if expected is not None else ["<|return|>", "<|end|>"]
  )
  assert closings(template, QA, **tokens) == ["b" + ends[0], "d" + ends[1]]
  assert closings(template, QA[:2], **tokens) == ["b" + ends[1]]


def test_a_template_that_refuses_other_conversations_has_one_closing_token():
  refuses = "{{ raise_exception('two only') if messages | length not in (1, 2) }}"
  template = EACH.replace("<|end|>", "<|end|><|return|>") + PROMPT
  tokens = {"eos_token": "<|return|>"}
  assert closings(template, QA[:2], **tokens) == ["b<|end|><|return|>"]
  assert closings(refuses + template, QA[:2], **tokens) == ["b<|end|>"]


# Prints the results of tools, and then the content, inside the turn of the call. The
# token that ends a call is another one if no result follows.
NESTED = r"""
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<|user|>' + message.content + '<|end|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|assistant|>' if not (loop.previtem.role == 'tool') }}
{%- for call in message.tool_calls or [] %}
{{- '<|tool_call|>' + call.function.name }}{{ call.function.arguments | tojson }}
{{- '<call_end>' }}
{%- endfor %}
{%- if message.tool_calls and not loop.last %}
{{- '<output_begin>' + loop.nextitem.content + '<output_end>' }}
{%- endif %}
{{- message.content }}
{{- '<|end|>' if loop.last or not message.tool_calls }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role == 'user' %}
{{- '<|assistant|>' }}
{%- endif %}
"""


def test_results_inside_of_a_turn_are_not_trained():
  tokenizer = TokenizerAdapter(
    raw_tokenizer(), chat_template=NESTED, eos_token="<|end|>"
  )
  call = {"function": {"name": "f", "arguments": {"n": 1}}}
  messages = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": [call]},
    {"role": "tool", "content": "17"},
    {"role": "assistant", "content": "b"},
  ]
  row = chat.render({"messages": messages}, tokenizer)
  # The token that begins the results stops the model.
  call_text = '<|tool_call|>f{"n": 1}<call_end><output_begin>'
  assert runs(row, tokenizer) == [call_text, "b<|end|>"]
  messages[1]["content"] = "let me see"
  with pytest.raises(
    ValueError, match=r"the content of messages\[1\] after the results"
  ):
    chat.render({"messages": messages}, tokenizer)


@pytest.mark.parametrize("calls", ["f", {"name": "f"}, ["f"]])
def test_calls_that_are_no_objects_are_refused(calls):
  message = {"role": "assistant", "content": "", "tool_calls": calls}
  with pytest.raises(
    ValueError, match=r'w: "messages"\[0\]: "tool_calls" is .* expected a'
  ):
    SFT.read({"messages": [message]}, "w")


def test_a_conversation_that_begins_with_a_call():
  tokenizer = tokenizer_of("llama32")
  call = {"function": {"name": "f", "arguments": {"n": 1}}}
  messages = [
    {"role": "assistant", "content": "", "tool_calls": [call]},
    {"role": "tool", "content": "1"},
    {"role": "assistant", "content": "b"},
  ]
  row = chat.render({"messages": messages}, tokenizer)
  assert runs(row, tokenizer) == expected(messages, tokenizer)[1]


def test_show_without_a_model_marks_what_is_trained():
  call = {"function": {"name": "f", "arguments": {"n": 1}}}
  messages = [
    {"role": "user", "content": "a"},
    {
      "role": "assistant",
      "content": "let me see",
      "reasoning_content": "hm",
      "tool_calls": [call],
    },
    {"role": "tool", "content": "1"},
    {"role": "assistant", "content": "b"},
  ]
  shown = show.describe_record(SFT.read({"messages": messages}, "w"))
  marked = re.findall("«(.*?)»", shown, re.DOTALL)
  row = chat.render({"messages": messages}, tokenizer_of("smollm3"))
  trained = runs(row, tokenizer_of("smollm3"))
  assert len(marked) == len(trained) == 2
  for piece in ("hm", "let me see", '"n": 1'):
    assert piece in marked[0] and piece in trained[0]


@pytest.mark.parametrize("name", ["llama31", "qwen25", "qwen3", "mistral", "deepseek"])
def test_generation_marks_of_transformers_give_the_same_text(name):
  transformers = pytest.importorskip("transformers")
  source, bos, eos, accepts = TEMPLATES[name]
  marked = source.replace("{{- open }}", "{{ open }}")
  marked = marked.replace("{{ open }}", "{% generation %}")
  marked = marked.replace("{{- close }}", "{{ close }}")
  marked = marked.replace("{{ close }}", "{% endgeneration %}")
  if name == "llama31":  # a block must open and close in one branch
    marked = marked.replace(
      "{%- if message.role == 'assistant' %}{% generation %}{% endif %}\n"
      "{{- message.content | trim }}{{ '<|eot_id|>' }}\n"
      "{%- if message.role == 'assistant' %}{% endgeneration %}{% endif %}",
      "{%- if message.role == 'assistant' %}{% generation %}"
      "{{- message.content | trim }}{{ '<|eot_id|>' }}{% endgeneration %}"
      "{%- else %}{{ message.content | trim }}{{ '<|eot_id|>' }}{% endif %}",
    )
  theirs = transformers.PreTrainedTokenizerFast(
    tokenizer_object=raw_tokenizer(), bos_token=bos or None, eos_token=eos
  )
  theirs.chat_template = marked
  tokenizer = tokenizer_of(name)
  for seed in range(10):
    messages = conversation(random.Random(f"{name} {seed}"), accepts)
    messages = [{k: v for k, v in m.items() if k != "weight"} for m in messages]
    out = theirs.apply_chat_template(
      messages, return_assistant_tokens_mask=True, return_dict=True, tokenize=True
    )
    ids, mask = np.asarray(out["input_ids"]), np.asarray(out["assistant_masks"])
    row = chat.render({"messages": messages}, tokenizer)
    assert tokenizer.decode(ids[mask != 0], skip_special_tokens=False) == "".join(
      runs(row, tokenizer)
    )
