import json

import pytest

from tests import toys_text
from tests.serve.fake_engine import FakeEngine, logprob
from tests.serve.serving import error_of, server
from tunix.generate.answers.formats import FORMATS
from tunix.generate.answers.reasoning import THINK_TOKENS

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello there"}]
TOOLS = [
  {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
  }
]
SHOWS_TOOLS = "{{ messages[0].content }}{{ '' if tools }}"  # a template
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def chat(made, **body):
  answer = made.post(PATH, {"messages": MESSAGES, **body})
  assert answer.status_code == 200, answer.text
  return answer.json()


def joined(events, key, index=0):
  """The texts of a stream under one key of its deltas."""
  choices = [c for event in events for c in event["choices"] if c["index"] == index]
  return "".join(choice["delta"].get(key) or "" for choice in choices)


def test_the_template_makes_the_prompt():
  with server(FakeEngine(text="well")) as made:
    body = chat(made, n=2, return_token_ids=True, max_tokens=100)
    tokenizer = made.engine.tokenizer
    prompt = tokenizer.apply_chat_template(MESSAGES, tokenize=True)
    assert (
      body["prompt_token_ids"] == prompt == made.engine.submitted[0].prompt.tolist()
    )
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    message = body["choices"][0]["message"]
    assert message["content"] == "well" and message["role"] == "assistant"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["token_ids"][-1] == tokenizer.eos_id()
    assert body["object"] == "chat.completion"
    assert body["usage"]["prompt_tokens"] == len(prompt)
    chat(made, chat_template_kwargs={"enable_thinking": False})
    text = tokenizer.decode(made.engine.submitted[-1].prompt, skip_special_tokens=False)
    assert text.endswith("<think>\n\n</think>\n\n")
    # Without a limit of the client, the engine's room is the limit.
    assert made.engine.submitted[-1].max_tokens == 256 - len(
      made.engine.submitted[-1].prompt
    )


def test_reasoning_content_and_calls():
  text = f"<think>\nadd them\n</think>\n\nI add.\n{CALL}"
  with server(FakeEngine(text=text)) as made:
    choice = chat(made, tools=TOOLS)["choices"][0]
    message = choice["message"]
    assert message["reasoning_content"] == message["reasoning"] == "add them"
    assert message["content"] == "I add." and choice["finish_reason"] == "tool_calls"
    function = message["tool_calls"][0]["function"]
    assert function["name"] == "add" and json.loads(function["arguments"]) == {"a": 1}
    none = chat(made, tools=TOOLS, tool_choice="none")["choices"][0]
    assert "<tool_call>" in none["message"]["content"]
    assert none["finish_reason"] == "stop" and "tool_calls" not in none["message"]
    hidden = chat(made, tools=TOOLS, include_reasoning=False)["choices"][0]["message"]
    assert "reasoning" not in hidden and hidden["content"] == "I add."

    events = made.events(
      PATH,
      {
        "messages": MESSAGES,
        "tools": TOOLS,
        "n": 2,
        "stream_options": {"include_usage": True},
      },
    )
    for index in (0, 1):
      assert joined(events, "reasoning", index) == "add them"
      assert joined(events, "content", index) == "I add."
      choices = [c for e in events for c in e["choices"] if c["index"] == index]
      assert choices[0]["delta"]["role"] == "assistant"
      assert choices[-1]["finish_reason"] == "tool_calls"
      found = [x for c in choices for x in c["delta"].get("tool_calls", ())]
      assert [x["index"] for x in found] == [0] and found[0]["function"] == function
    tokens = len(made.engine.script(None, 0))
    assert events[-1]["usage"]["completion_tokens"] == 2 * tokens


def test_a_prompt_may_open_the_reasoning():
  template = "{{ messages[0].content }}<think>\n"
  tokenizer = toys_text.chat_tokenizer("plain")
  tokenizer = type(tokenizer)(tokenizer, chat_template=template)
  text = "first so</think>then this"
  with server(FakeEngine(tokenizer, text=text)) as made:
    message = chat(made)["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("first so", "then this")
  with server(FakeEngine(tokenizer, text=text), split_reasoning=False) as made:
    assert chat(made)["choices"][0]["message"]["content"] == text


def test_the_schema_of_a_tool_says_what_a_tagged_value_is():
  template = SHOWS_TOOLS + "{# <function= #}"
  tokenizer = toys_text.chat_tokenizer("plain")
  tokenizer = type(tokenizer)(tokenizer, chat_template=template)
  text = "so <tool_call>\n<function=add>\n<parameter=a>\n7\n</parameter>\n"
  text += "</function>\n</tool_call>"
  schema = {"type": "object", "properties": {"a": {"type": "string"}}}
  texts = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
  with server(FakeEngine(tokenizer, text=text), tool_format="auto") as made:
    for tools, value in ((TOOLS, 7), (texts, "7")):
      (call,) = chat(made, tools=tools)["choices"][0]["message"]["tool_calls"]
      assert json.loads(call["function"]["arguments"]) == {"a": value}
    events = made.events(PATH, {"messages": MESSAGES, "tools": texts})
    assert joined(events, "content") == "so"
    deltas = [e["choices"][0]["delta"] for e in events]
    (found,) = [x for d in deltas for x in d.get("tool_calls", ())]
    assert json.loads(found["function"]["arguments"]) == {"a": "7"}


def test_mistral_marks_are_special_tokens():
  """The engine's text has no special tokens; the marks come from the ids."""
  raw = toys_text.bpe()
  raw.add_special_tokens(["[TOOL_CALLS]", "[ARGS]"])
  template = SHOWS_TOOLS + "{# [TOOL_CALLS] #}"
  adapter = type(toys_text.chat_tokenizer("plain"))
  tokenizer = adapter(raw, chat_template=template, eos_token="</s>")
  engine = FakeEngine(tokenizer, text='so é [TOOL_CALLS]add[ARGS]{"a": 1}')
  with server(engine, tool_format="auto") as made:
    choice = chat(made, tools=TOOLS)["choices"][0]
    assert choice["message"]["content"] == "so é"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "add"
    events = made.events(PATH, {"messages": MESSAGES, "tools": TOOLS})
    assert joined(events, "content") == "so é"
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


GEMMA_CALL = '<|tool_call>call:add{a:1,b:<|"|>x<|"|>}<tool_call|>'


@pytest.mark.parametrize(
  ("opening", "closing", "mark", "call"),
  [
    ("[THINK]", "[/THINK]", "[TOOL_CALLS]", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": "x"}'),
    ("<|channel>thought\n", "<channel|>", "<|tool_call>", GEMMA_CALL),
  ],
)
def test_marks_of_reasoning_are_special_tokens(opening, closing, mark, call):
  raw = toys_text.bpe()
  raw.add_special_tokens([*THINK_TOKENS, *FORMATS["gemma4"].marks])
  raw.add_special_tokens(["[TOOL_CALLS]", "[ARGS]"])
  template = SHOWS_TOOLS + "{# " + mark + " #}"
  adapter = type(toys_text.chat_tokenizer("plain"))
  tokenizer = adapter(raw, chat_template=template, eos_token="</s>")
  text = f"{opening}so é{closing}yes"
  with server(FakeEngine(tokenizer, text=text), tool_format="auto") as made:
    message = chat(made)["choices"][0]["message"]  # without tools
    assert (message["reasoning_content"], message["content"]) == ("so é", "yes")
  with server(FakeEngine(tokenizer, text=text + call), tool_format="auto") as made:
    message = chat(made, tools=TOOLS)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("so é", "yes")
    (found,) = message["tool_calls"]
    assert json.loads(found["function"]["arguments"]) == {"a": 1, "b": "x"}


def test_logprobs():
  with server(FakeEngine(text="the sea")) as made:
    body = chat(made, logprobs=True, top_logprobs=2)
    tokens = made.engine.script(None, 0)
    content = body["choices"][0]["logprobs"]["content"]
    assert [x["logprob"] for x in content] == pytest.approx(
      [logprob(t) for t in tokens]
    )
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]
    assert [len(x["top_logprobs"]) for x in content] == [2] * len(tokens)
    named = chat(made, logprobs=True, return_tokens_as_token_ids=True)
    entries = named["choices"][0]["logprobs"]["content"]
    assert [x["token"] for x in entries] == [f"token_id:{t}" for t in tokens]
    events = made.events(PATH, {"messages": MESSAGES, "logprobs": True})
    parts = [x for e in events for x in e["choices"][0]["logprobs"]["content"]]
    assert [x["logprob"] for x in parts] == [x["logprob"] for x in content]


def test_messages_reach_the_template():
  with server(FakeEngine(text="x")) as made:
    call = {
      "id": "a",
      "type": "function",
      "function": {"name": "add", "arguments": '{"a": 1}'},
    }
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    chat(
      made,
      messages=[
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "a"},
      ],
    )
    text = made.engine.tokenizer.decode(
      made.engine.submitted[-1].prompt, skip_special_tokens=False
    )
    assert "system\nbe brief" in text and "onetwo" in text
    assert '"arguments": {"a": 1}' in text  # an object, not text


class Grammars:
  """Takes note of the constraints that are asked for."""

  def __init__(self):
    self.asked = []

  def __getattr__(self, name):
    if name not in ("json_schema", "json_object", "regex", "choice"):
      raise AttributeError(name)

    def build(*values):
      if values == ("[",):
        raise ValueError("regex is '[', expected one that can be enforced")
      self.asked.append((name, *values))
      return name

    return build


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
def test_an_event_is_one_line_also_to_clients_that_split_by_any_line_end(path):
  text = "a\n\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029b\u00a8\u2027"
  body = {"messages": MESSAGES, "prompt": "a", "stream": True, "max_tokens": 100}
  del body["prompt" if path == PATH else "messages"]
  with server(FakeEngine(text=text)) as made:
    answer = made.post(path, body).text
  lines = [line for line in answer.splitlines() if line]
  assert lines.pop() == "data: [DONE]"
  events = [json.loads(line.removeprefix("data: ")) for line in lines]
  parts = [event["choices"][0] for event in events]
  read = [p["text"] if "text" in p else p["delta"].get("content", "") for p in parts]
  assert "".join(read) == text


def test_constraints():
  schema = {"type": "object"}
  forms = [
    {"response_format": {"type": "json_object"}},
    {
      "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": schema, "strict": True},
      }
    },
    {"response_format": {"type": "regex", "regex": "a+"}},
    {"structured_outputs": {"choice": ["a", "b"]}},
    {"structured_outputs": {"json": schema}},
  ]
  grammars = Grammars()
  # Text under a constraint is the answer, whatever tags it has.
  with server(FakeEngine(text="<think>a"), parts={"grammars": grammars}) as made:
    for form in forms:
      message = chat(made, **form)["choices"][0]["message"]
      assert message["content"] == "<think>a"
    assert grammars.asked == [
      ("json_object",),
      ("json_schema", schema),
      ("regex", "a+"),
      ("choice", ["a", "b"]),
      ("json_schema", schema),
    ]
    assert made.engine.submitted[-1].constraint == "json_schema"
    chat(made, response_format={"type": "text"})
    assert made.engine.submitted[-1].constraint is None
    body = {"messages": MESSAGES, "response_format": {"type": "regex", "regex": "["}}
    assert error_of(made.post(PATH, body), 400)["code"] == "invalid_constraint"


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
BAD = {
  "no messages": ({"messages": None}, "messages"),
  "empty": ({"messages": []}, "messages"),
  "role": ({"messages": [{"role": "x", "content": "a"}]}, "messages[0].role"),
  "content": ({"messages": [{"role": "user"}]}, "messages[0].content"),
  "image": (
    {"messages": [{"role": "user", "content": [IMAGE]}]},
    "messages[0].content[0]",
  ),
  "arguments": (
    {
      "messages": [
        {
          "role": "assistant",
          "tool_calls": [{"function": {"name": "a", "arguments": "{"}}],
        }
      ]
    },
    "messages[0].tool_calls[0].function.arguments",
  ),
  "tools": ({"tools": [{"type": "function"}]}, "tools[0]"),
  "forced call": ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
  "top without logprobs": ({"top_logprobs": 2}, "top_logprobs"),
  "logprobs": ({"logprobs": 2}, "logprobs"),
  "reserved variable": ({"chat_template_kwargs": {"messages": []}}, "messages"),
  "effort": ({"reasoning_effort": "low"}, "reasoning_effort"),
  "no room": ({"max_completion_tokens": 250}, "max_tokens"),
  "two constraints": (
    {
      "response_format": {"type": "json_object"},
      "structured_outputs": {"json_object": True},
    },
    "response_format",
  ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_fields_are_refused(name):
  body, param = BAD[name]
  with server() as made:
    error = error_of(made.post(PATH, {"messages": MESSAGES, **body}), 400)
    assert error["param"] == param and not made.engine.submitted


def test_templates_that_refuse_and_models_without_one():
  with server(FakeEngine(toys_text.chat_tokenizer("gemma"))) as made:
    messages = [*MESSAGES, *MESSAGES]
    error = error_of(made.post(PATH, {"messages": messages}), 400)
    assert error["code"] == "chat_template_error" and "alternate" in error["message"]
    error = error_of(made.post(PATH, {"messages": MESSAGES, "tools": TOOLS}), 400)
    assert error["param"] == "tools" and "a template that prints" in error["message"]
    chat(made, tools=TOOLS, tool_choice="none")
  with server(FakeEngine(toys_text.chat_tokenizer(None))) as made:
    error = error_of(made.post(PATH, {"messages": MESSAGES}), 400)
    assert error["code"] == "no_chat_template"
