"""Calls in JSON, in all formats that have them."""

import json

import pytest

from tests.generate.answers.formats_test import read
from tests.generate.answers.xml_calls_test import deepseek, mark
from tunix.generate.answers.call_json import json_calls, object_of
from tunix.generate.answers.formats import FORMATS
from tunix.generate.answers.marked_calls import MarkedReader, Marks

# format -> a call, whose arguments replace "%s", and its end
CALLS = [
  ("hermes", '<tool_call>{"name": "add", "arguments": %s}', "</tool_call>"),
  ("llama3", '{"name": "add", "parameters": %s}', ""),
  ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": %s}]', ""),
  ("mistral", "[TOOL_CALLS]add[ARGS]%s", ""),
  ("mistral", "[TOOL_CALLS]add[CALL_ID]a1B2c3D4e[ARGS]%s", ""),
  ("granite", '<|tool_call|>[{"name": "add", "arguments": %s}]', "<|/tool_call|>"),
  ("granite", '<|tool_call|>[{"name": "add", "arguments": %s}]', ""),
  ("phi4_mini", 'functools[{"name": "add", "arguments": %s}]', ""),
  ("deepseek_v3", deepseek(f"add{mark('tool sep')}%s"), ""),
  ("harmony", "to=functions.add<|message|>%s", "<|call|>"),
]
SAID = {"harmony": "<|start|>assistant<|channel|>final<|message|>"}

each_call = pytest.mark.parametrize(("form", "call", "end"), CALLS)


def answer(form, text, cut):
  reader = FORMATS[form].reader(["add"])
  piece = read(reader, text[:cut], text[cut:])
  return piece.content, [json.loads(call.arguments) for call in piece.calls]


@each_call
def test_all_texts_of_json_are_read(form, call, end):
  marks = '</tool_call> <|/tool_call|> [TOOL_CALLS] <|call|> ; ]} \\" \\\\ '
  marks += mark("tool calls end")
  text = call % f'{{"a": "{marks}", "b": "two\nlines\tand more"}}' + end
  wanted = json.loads(f'"{marks}"')
  for cut in (0, len(text) // 2, text.index("lines")):
    assert answer(form, text, cut) == (
      "",
      [{"a": wanted, "b": "two\nlines\tand more"}],
    )


@pytest.mark.parametrize(("form", "call", "end"), [x for x in CALLS if x[2]])
def test_more_end_marks_in_a_text_than_are_looked_at(form, call, end):
  text = call % json.dumps({"a": end * 20}) + end
  header = "<|start|>assistant " if form == "harmony" else ""
  assert answer(form, text + header + text, 0) == ("", [{"a": end * 20}] * 2)


@each_call
def test_text_after_a_call_stays_text(form, call, end):
  said = '\n\nDone: {"b"}, and "more.'
  text = call % '{"a": 1}' + end + SAID.get(form, "") + said
  for cut in (0, len(text) - 9):
    content, arguments = answer(form, text, cut)
    assert (content.strip(), arguments) == (said.strip(), [{"a": 1}])


@each_call
@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e400", '"open', "[" * 99999])
def test_what_is_no_json_stays_text(form, call, end, value):
  text = call % f'{{"a": {value}}}' + end
  shown = text.removesuffix("<|call|>")
  assert answer(form, text, len(text) - 5) == (shown, [])
  if end:  # the block hides no call after it
    header = "<|start|>assistant " if form == "harmony" else " "
    assert answer(form, text + header + call % "{}" + end, 0)[1] == [{}]


@each_call
def test_halves_of_surrogate_pairs_are_replaced(form, call, end):
  text = call % r'{"\ud83d": "\ude00 \ud83d\ude00"}' + end
  (made,) = read(FORMATS[form].reader(["add"]), text).calls
  assert json.loads(made.arguments.encode()) == {"\ufffd": "\ufffd \U0001f600"}


HERMES = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
PROSE = [  # format, text with a mark that begins no call, a call
  ("hermes", "I use <tool_call> tags.", HERMES),
  ("hermes", '<tool_call>{"name": "add", "arguments"', HERMES),
  ("mistral", '[TOOL_CALLS]add[ARGS]{"a": NaN}', "[TOOL_CALLS]add[ARGS]{}"),
  ("granite", "<|tool_call|>s", '<|tool_call|>[{"name": "add"}]<|/tool_call|>'),
  ("phi4_mini", "functools[{ or <|tool_call|>,", 'functools[{"name": "add"}]'),
  ("olmo3", "I use <function_calls>.", "<function_calls>add()</function_calls>"),
  ("smollm3_code", "<code>a = 1", "<code>print(add())</code>"),
  ("deepseek_v3", mark("tool calls begin"), deepseek(f"add{mark('tool sep')}{{}}")),
  ("gemma4", "I use <|tool_call>.", "<|tool_call>call:add{}<tool_call|>"),
  ("glm4", "I use <tool_call> tags.", "<tool_call>add</tool_call>"),
  ("qwen3_coder", "I use <function=add>.", "<tool_call><function=add></function>"),
  ("qwen3_coder", "I use <tool_call>.", "<function=add></function></tool_call>"),
]


@pytest.mark.parametrize(("form", "prose", "call"), PROSE)
def test_a_mark_in_prose_hides_no_call_after_it(form, prose, call):
  text = f"{prose}\n{call}"
  for cut in (0, len(prose) // 2, len(prose), len(text) - 3):
    assert answer(form, text, cut) == (prose, [{}])


def test_a_mark_over_and_over_is_not_read_each_time():
  bodies = []
  reader = MarkedReader(Marks("<a>", None, bodies.append))
  assert read(reader, "<a>b" * 4000).content == "<a>b" * 4000
  assert len(bodies) < 200


ARGUMENTS = [  # arguments, what they stand for
  ('{"a": 1}', {"a": 1}),
  ('{"a": "two\nlines"}', {"a": "two\nlines"}),
  *(("", {}), (" ", {}), ("null", {}), (None, {}), ({"a": 1}, {"a": 1})),
  *(('{"a": NaN}', None), ('{"a": 1e999}', None), ("[1]", None), ("{} {}", None)),
  *(("oslo", None), ([1], None), (3, None), ('"{}"', None), ("[" * 99999, None)),
]


@pytest.mark.parametrize("given, wanted", ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_arguments_of_a_model_and_of_a_client_are_read_alike(given, wanted):
  assert object_of(given) == wanted
  made = json_calls(json.dumps({"name": "add", "arguments": given}) + "!")
  assert made == (None if wanted is None else ([("add", wanted)], "!"))
