import json

import pytest

from tunix.generate.answers.formats import FORMATS, format_of
from tunix.generate.answers.reasoning import ReasoningReader


def read(tool_format, text):
  reader = ReasoningReader(FORMATS[tool_format].reader(["add"]), is_open=False)
  piece = reader.push(text) + reader.end()
  made = [(call.name, json.loads(call.arguments)) for call in piece.calls]
  return piece.reasoning, piece.content, made


GRANITE = (
  "I add.\n<|tool_call|>"
  '[{"name": "add", "arguments": {"a": 1}}, {"name": "sub", "arguments": {}}]'
)
OLMO = "I add. <function_calls>\nadd(a=1, b=[2, {'c': null}])\nx.y(ok=true, n=-2.5)\n"


@pytest.mark.parametrize("end", ["", "<|/tool_call|>"])
def test_granite(end):
  wanted = [("add", {"a": 1}), ("sub", {})]
  assert read("granite", GRANITE + end) == ("", "I add.", wanted)
  thinks = "<think>hm</think>" + GRANITE
  assert read("granite", thinks + end) == ("hm", "I add.", wanted)


@pytest.mark.parametrize("opening", ["<|tool_call|>[", "functools["])
def test_phi4_mini(opening):
  calls = '{"name": "add", "arguments": {"a": [1]}}, {"name": "sub", "parameters": {}}]'
  text = f"I use functools[0].\n{opening}{calls}"
  wanted = "I use functools[0].", [("add", {"a": [1]}), ("sub", {})]
  assert read("phi4_mini", text) == ("", *wanted)
  reader = FORMATS["phi4_mini"].reader(["add"])
  pieces = [reader.push(letter) for letter in text] + [reader.end()]
  assert "".join(piece.content for piece in pieces) == wanted[0]
  assert [call.name for piece in pieces for call in piece.calls] == ["add", "sub"]


@pytest.mark.parametrize("end", ["", "</function_calls>"])
def test_olmo3(end):
  wanted = [("add", {"a": 1, "b": [2, {"c": None}]}), ("x.y", {"ok": True, "n": -2.5})]
  assert read("olmo3", OLMO + end) == ("", "I add.", wanted)


def test_python_code_of_smollm3():
  code = "I add.\n<code>\nadd(a=1)\nprint(sub(b='x'))\n</code>"
  assert read("smollm3_code", code) == (
    "",
    "I add.",
    [("add", {"a": 1}), ("sub", {"b": "x"})],
  )
  other = "<code>total = add(a=1)\nprint(total)</code>"
  assert read("smollm3_code", other) == ("", other, [])


def test_reasoning_of_ministral3():
  text = '[THINK]so we ask[/THINK]yes[TOOL_CALLS]add[ARGS]{"a": 1}'
  assert read("mistral", text) == ("so we ask", "yes", [("add", {"a": 1})])


GEMMA = (
  "<|channel>thought\nso we ask\n<channel|>I add. "
  '<|tool_call>call:add{a:3,note:<|"|>x:1,{"y"}\n\\<|"|>,z:[true,{<|"|>k<|"|>:null}]}'
  "<tool_call|><|tool_call>call:x.y{}"
)


@pytest.mark.parametrize("end", ["", "<tool_call|>"])
def test_gemma4(end):
  more = {"note": 'x:1,{"y"}\n\\', "z": [True, {"k": None}]}
  wanted = [("add", {"a": 3, **more}), ("x.y", {})]
  assert read("gemma4", GEMMA + end) == ("so we ask", "I add.", wanted)
  empty = "<|channel>thought\n<channel|>five"
  assert read("gemma4", empty) == ("", "five", [])


def test_gemma4_letter_by_letter():
  inner = FORMATS["gemma4"].reader(["add"])
  reader = ReasoningReader(inner, is_open=False)
  pieces = [reader.push(letter) for letter in GEMMA] + [reader.end()]
  assert "".join(piece.reasoning for piece in pieces) == "so we ask"
  assert "".join(piece.content for piece in pieces) == "I add."
  assert [call.name for piece in pieces for call in piece.calls] == ["add", "x.y"]


@pytest.mark.parametrize(
  "tool_format, text",
  [
    ("gemma4", "<|tool_call>add{}<tool_call|>"),
    ("gemma4", "<|tool_call>call:add{a:b}<tool_call|>"),
    ("gemma4", "<|tool_call>call:add{a:1e999}<tool_call|>"),
    ("gemma4", '<|tool_call>call:add{a:<|"|>b}<tool_call|>'),
    ("gemma4", "<|tool_call>call:add{a:1}{b:2}<tool_call|>"),
    ("gemma4", "<|tool_call>call:add{a:" + "[" * 100_000 + "}<tool_call|>"),
    ("granite", "<|tool_call|>[1]"),
    ("granite", '<|tool_call|>{"name": "add"'),
    ("granite", '<|tool_call|>[{"name": "add", "arguments": 3}]<|/tool_call|>'),
    ("phi4_mini", "functools[0]"),
    ("phi4_mini", "functools.partial"),
    ("olmo3", "<function_calls>add(1)</function_calls>"),
    ("olmo3", "<function_calls>add(a=b)</function_calls>"),
    ("olmo3", "<function_calls>add(a={1})</function_calls>"),
    ("olmo3", "<function_calls>add(**{'a': 1})</function_calls>"),
    ("olmo3", "<function_calls>add(a=__import__('os'))</function_calls>"),
    ("olmo3", "<function_calls>a = 3</function_calls>"),
    ("olmo3", "<function_calls>add(a=" + "(" * 5000 + "</function_calls>"),
    ("olmo3", "<function_calls>add(a=1e999)</function_calls>"),
    ("olmo3", "<function_calls>add(a=\0)</function_calls>"),
  ],
)
def test_what_is_no_call_stays_text(tool_format, text):
  assert read(tool_format, text) == ("", text, [])


def test_formats_of_the_families():
  assert format_of("{{ '<|tool_call|>[' }}") == "granite"
  assert format_of("{{ '<function_calls>' }}") == "olmo3"
  assert format_of("{{ '<|tool|>' + tools + '<|/tool|>' }}") == "phi4_mini"
  assert format_of("{{ '<|tool_call>call:' }}") == "gemma4"
