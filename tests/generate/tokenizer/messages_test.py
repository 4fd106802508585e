"""Messages have one form: from records, prompts, episodes and requests."""

import json
import random
import types
from typing import Any

import pytest

from tests import toys_calls
from tests.toys_calls import tokenizer_of
from tunix.data.records import LABELLED, PAIRS, PROMPT_ROWS, PROMPTS, SFT
from tunix.data.render import render_record
from tunix.generate.tokenizer.messages import CallForm, call_form
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl import roles
from tunix.rl.env.conversation import Conversation
from tunix.serve.http.fields import Fields
from tunix.serve.openai import chat as served

TEMPLATES = {**toys_calls.TEMPLATES, **toys_calls.UNLIKE_JSON}
ANSWER = {"role": "assistant", "content": "yes"}
# A template that takes objects and texts, as the published ones of Qwen3 do.
EITHER = toys_calls.QWEN25.replace(
  "call.function.arguments | tojson",
  "call.function.arguments if call.function.arguments is string "
  "else call.function.arguments | tojson",
)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_form_that_a_template_takes_is_found(name):
  joins = name == "deepseek_v3"
  assert call_form(TEMPLATES[name][0]) == CallForm(joins, joins)


@pytest.mark.parametrize(
  ("source", "form"),
  [
    (EITHER, CallForm()),
    ("{{ messages[-1].tool_calls[0].function.arguments }}", CallForm(True)),
    ("{{ messages[-1].tool_calls[0].arguments | tojson }}", CallForm()),
    ("{{ raise_exception('no') }}", CallForm()),
    ("{{ messages[-1].content }}", CallForm()),
    (
      "{% if messages[-1].content is none %}"
      "{{ messages[-1].tool_calls[0].function.arguments | tojson }}{% endif %}",
      CallForm(False, True),
    ),
  ],
)
def test_the_form_that_unusual_templates_take(source, form):
  assert call_form(source) == form


def text_in(rng):
  text = rng.choice(["a", "one two", "é\u2028", '{"a": 1}'])
  if rng.random() < 0.5:
    return text
  return [{"type": "text", "text": text}, {"type": "text", "text": "b"}]


def nulls(rng, *names):
  return {name: None for name in names if rng.random() < 0.3}


def call_in(rng):
  """A call as one of the libraries writes it."""
  arguments = rng.choice([{}, {"city": "Oslo", "days": None}, {"n": [1, {"ü": 2}]}])
  given = rng.choice([arguments, json.dumps(arguments, ensure_ascii=False)])
  function = {"name": rng.choice(["add", "f"]), "arguments": given}
  call = {"id": "123456789", "type": "function", "function": function}
  return call | nulls(rng, "index")


def conversation(rng, accepts):
  messages = []
  if "system" in accepts and rng.random() < 0.7:
    role = rng.choice(["system", "developer"])
    messages.append({"role": role, "content": text_in(rng)} | nulls(rng, "name"))
  if rng.random() < 0.7 and "no_calls" not in accepts:
    call = call_in(rng)
    content = rng.choice([{"content": None}, {"content": ""}, {}])
    messages += [
      {"role": "user", "content": text_in(rng)},
      {"role": "assistant", "tool_calls": [call], **content},
      {"role": "tool", "content": text_in(rng), "tool_call_id": call["id"]},
      ANSWER | nulls(rng, "tool_calls", "reasoning_content", "weight", "train"),
    ]
  last = {"role": "user", "content": text_in(rng)}
  return [*messages, last | nulls(rng, "name", "tool_calls", "weight")]


def of_record(kind, record, tokenizer):
  rendered = render_record(record, kind, tokenizer)
  ids = rendered.prompt
  if kind is SFT:  # an earlier answer may be trained
    ids = rendered.tokens
  return tokenizer.decode(ids, skip_special_tokens=False)


def doors(messages, tokenizer):
  """Name of each door -> the text of the conversation behind it."""
  prompt = {"prompt": messages}
  whole = [*messages, ANSWER]
  pair = {"chosen": whole, "rejected": [*messages, ANSWER | {"content": "no"}]}
  context: Any = types.SimpleNamespace(
    tokenizer=tokenizer,
    check_size=lambda *_: None,
    settings=types.SimpleNamespace(max_image_pixels=0),
    max_tokens=0,
  )
  ids = {
    "episode": Conversation(tokenizer).observe(messages),
    "rollout": roles.rendered(tokenizer, messages, False),
  }
  return {
    "SFT": of_record(SFT, {"messages": whole}, tokenizer),
    "response": of_record(SFT, prompt | {"response": "yes"}, tokenizer),
    "pairs": of_record(PAIRS, pair, tokenizer),
    "KTO": of_record(LABELLED, {"completion": whole, "label": True}, tokenizer),
    "prompt": of_record(PROMPTS, prompt, tokenizer),
    "row": render_record(prompt, PROMPT_ROWS, tokenizer).extra["prompts"],
    "server": served.read_prompt(Fields({"messages": messages}), context).text,
    **{
      name: tokenizer.decode(of, skip_special_tokens=False) for name, of in ids.items()
    },
  }


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_is_the_same_behind_all_doors(name):
  tokenizer, accepts = tokenizer_of(name), TEMPLATES[name][3]
  for seed in range(6):
    rng = random.Random(f"{name} {seed}")
    messages = conversation(rng, accepts)
    before = repr(messages)
    found = doors(messages, tokenizer)
    assert repr(messages) == before  # the caller's messages do not change
    text = found["server"]
    assert {k: v[: len(text)] for k, v in found.items()} == dict.fromkeys(found, text)
    calls = [c for m in messages for c in m.get("tool_calls") or []]
    assert all(call["function"]["name"] in text for call in calls)
    assert '\\"city' not in text  # never encoded twice
    assert '"index": null' not in text


@pytest.mark.parametrize("name", ["qwen25", "deepseek_v3"])
def test_a_call_without_arguments(name):
  def text(**given):
    call = {"type": "function", "function": {"name": "f", **given}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages = [{"role": "user", "content": "a"}, turn]
    return tokenizer_of(name).apply_chat_template(messages, False)

  given = [{}, *({"arguments": x} for x in (None, "", " ", "null", "{}", {}))]
  [only] = {text(**arguments) for arguments in given}
  assert "{}" in only


def test_arguments_that_are_no_object_are_refused():
  tokenizer = tokenizer_of("qwen25")
  for arguments in ("oslo", "[1]", [1]):
    call = {"function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    error = r"^w: messages\[0\]\.tool_calls\[0\]\.function\.arguments is .*, expected a"
    with pytest.raises(ValueError, match=error):
      render_record({"messages": messages}, SFT, tokenizer, where="w")


def test_messages_stay_as_given_for_runs_of_older_versions():
  given = TokenizerAdapter(tokenizer_of("qwen25"), message_form="given")
  call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
  messages = [
    {"role": "developer", "content": "a", "name": None},
    {"role": "assistant", "tool_calls": [call]},
  ]
  text = TokenizerAdapter(given).apply_chat_template(messages)
  assert text.startswith("<|im_start|>developer\na") and '\\"a\\": 1' in text
