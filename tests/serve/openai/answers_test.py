"""The server and episodes read the same message, in every form of tool calls."""

import json

import pytest

from tests import toys_text
from tests.generate.answers.xml_calls_test import deepseek, glm, mark, qwen
from tests.serve.fake_engine import FakeEngine
from tests.serve.openai.chat_test import MESSAGES, PATH, chat, joined
from tests.serve.serving import server
from tunix.generate.answers.formats import FORMATS, format_for
from tunix.generate.answers.reasoning import THINK_TOKENS
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.env import conversation

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]

JSON = '{"name": "add", "arguments": {"a": 1}}'
FINAL = "<|start|>assistant<|channel|>final<|message|>"
CALLS = {  # form -> a call of add with a = 1
  "deepseek_v3": deepseek(f'add{mark("tool sep")}{{"a": 1}}'),
  "gemma4": "<|tool_call>call:add{a:1}<tool_call|>",
  "glm4": glm(a=1),
  "granite": f"<|tool_call|>[{JSON}]<|/tool_call|>",
  "harmony": '<|start|>assistant to=functions.add<|message|>{"a": 1}<|call|>',
  "hermes": f"<tool_call>{JSON}</tool_call>",
  "llama3": f"<|python_tag|>{JSON};",
  "mistral": '[TOOL_CALLS]add[ARGS]{"a": 1}',
  "none": f"<tool_call>{JSON}</tool_call>",
  "olmo3": "<function_calls>add(a=1)</function_calls>",
  "phi4_mini": f"functools[{JSON}]",
  "qwen3_coder": qwen(a=1),
  "smollm3_code": "<code>print(add(a=1))</code>",
}


def tokenizer_of(form, are_special):
  """A tokenizer whose template shows a form; its vocabulary may have the marks."""
  raw = toys_text.bpe()
  raw.add_tokens(["<over>"])  # an end of sequence that is no special token
  if are_special:
    raw.add_special_tokens([*FORMATS[form].marks, *THINK_TOKENS])
  shown = "".join(FORMATS[form].template_marks[:1])
  template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '' if tools }}"
  template += "{# " + shown + " #}"
  return TokenizerAdapter(raw, chat_template=template, eos_token="<over>")


def of_server(choice):
  message = choice["message"]
  calls = [call["function"] for call in message.get("tool_calls", ())]
  return {
    "content": message["content"] or "",
    "reasoning": message.get("reasoning_content", ""),
    "calls": [(x["name"], json.loads(x["arguments"])) for x in calls],
    "problem": choice.get("malformed_tool_call"),
  }


def of_stream(events):
  choices = [event["choices"][0] for event in events]
  message = {key: joined(events, key) for key in ("content", "reasoning_content")}
  calls = [call for x in choices for call in x["delta"].get("tool_calls", ())]
  return of_server({**choices[-1], "message": {**message, "tool_calls": calls}})


def of_episode(tokenizer, ids, tools):
  talk = conversation.Conversation(tokenizer, tools)
  talk.observe("hello there")
  action = talk.act(ids, "eos")
  calls = [call["function"] for call in action.message.get("tool_calls", ())]
  return {
    "content": action.message["content"],
    "reasoning": action.message.get("reasoning_content", ""),
    "calls": [(x["name"], x["arguments"]) for x in calls],
    "problem": action.problem,
  }


@pytest.mark.parametrize("are_special", [True, False], ids=["special", "text"])
@pytest.mark.parametrize("form", sorted(FORMATS))
def test_the_server_and_episodes_read_the_same_message(form, are_special, monkeypatch):
  call, is_read = CALLS[form], form != "none"
  thought = "<think>hm</think>"
  if form == "harmony":
    thought = "<|channel|>analysis<|message|>hm<|end|>"
  texts = {  # text, number of calls
    "call": (call, 1),
    "several": (call + call, 2),
    "cut": (call[: call.index("1")], 0),
    "no call": (f"{FINAL * (form == 'harmony')}so two", 0),
    "reasoning": (thought + call, 1),
  }
  if not FORMATS[form].template_marks:  # no template shows it
    by_name = lambda template, tools: format_for(template, tools, form)
    monkeypatch.setattr(conversation, "format_for", by_name)
  tokenizer = tokenizer_of(form, are_special)
  with server(FakeEngine(tokenizer, text=""), tool_format=form) as made:
    for kind, (text, count) in texts.items():
      ids = [*tokenizer.encode(text), tokenizer.eos_id()]
      made.engine.script = lambda request, sample, ids=ids: ids
      for tools in (TOOLS, []) if kind == "reasoning" else (TOOLS,):
        body = {"messages": MESSAGES, "tools": tools}
        # Marks that are special tokens are put into the stream piece by piece.
        read = of_stream(made.events(PATH, body)) if are_special else None
        read = read or of_server(chat(made, tools=tools)["choices"][0])
        assert of_episode(tokenizer, ids, tools) == read
        if not tools and form != "harmony":
          assert not read["calls"] and read["problem"] is None
          continue
        assert read["calls"] == [("add", {"a": 1})] * count * is_read
        assert (read["problem"] is not None) == (kind == "cut" and is_read)
        assert read["reasoning"] == "hm" * (kind == "reasoning")
        if kind == "no call" or (count and is_read):
          assert read["content"] == ("so two" if kind == "no call" else "")
