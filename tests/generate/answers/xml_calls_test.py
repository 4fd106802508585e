import itertools
import json

import pytest

from tunix.generate.answers.formats import FORMATS, format_of

SCHEMA = {
  "properties": {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "maybe": {"type": ["string", "null"]},
    "any": {"anyOf": [{"type": "string"}, {"type": "array"}]},
    "odd": {"type": 3, "oneOf": "x"},
  }
}


def read(tool_format, text):
  reader = FORMATS[tool_format].reader({"add": SCHEMA})
  piece = reader.push(text) + reader.end()
  return piece.content, [(c.name, json.loads(c.arguments)) for c in piece.calls]


def qwen(name="add", **arguments):
  body = "".join(
    f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()
  )
  return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def glm(name="add", between="\n", **arguments):
  pairs = [
    f"<arg_key>{key}</arg_key>{between}<arg_value>{value}</arg_value>{between}"
    for key, value in arguments.items()
  ]
  return f"<tool_call>{name}{between}{''.join(pairs)}</tool_call>"


@pytest.mark.parametrize("write", [qwen, glm], ids=["qwen3_coder", "glm4"])
def test_the_schema_says_what_a_value_is(write):
  form = {qwen: "qwen3_coder", glm: "glm4"}[write]
  texts = {"text": "7", "count": "7", "maybe": "None", "any": "[1]", "odd": "True"}
  texts |= {"new": '{"a": [1, null]}', "plain": "so <b>\n\nit</b>", "nan": "NaN"}
  values = {"text": "7", "count": 7, "maybe": None, "any": "[1]", "odd": True}
  values |= {"new": {"a": [1, None]}, "plain": "so <b>\n\nit</b>", "nan": "NaN"}
  second = write("other.tool", text="7", count="x")
  content, calls = read(form, f"I add.\n{write(**texts)}\n{second}")
  assert content == "I add."
  assert calls == [("add", values), ("other.tool", {"text": 7, "count": "x"})]
  assert read(form, write("stop")) == ("", [("stop", {})])
  # Some models write the end token instead of the last tag.
  assert read(form, write(count="1").removesuffix("</tool_call>"))[1]


def deep(kind, depth):
  schema = {"type": kind}
  for _ in range(depth):
    schema = {"anyOf": [schema]}
  return schema


TYPED = [  # schema, text, value
  ({"enum": ["1", "2"]}, "1", "1"),
  ({"enum": [1, 2]}, "1", 1),
  ({"enum": [1, "auto"]}, "1", 1),
  ({"enum": [1, "1"]}, "1", "1"),
  ({"enum": [None, "1"]}, "null", None),
  ({"const": "1"}, "1", "1"),
  ({"const": None}, "null", None),
  ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "1", "1"),
  ({"allOf": [{"type": ["string", "integer"]}, {"type": "integer"}]}, "1", 1),
  ({"$ref": "#/$defs/text"}, "1", "1"),
  ({"$ref": "#/definitions/a~1b"}, "1", "1"),
  ({"anyOf": [{"$ref": "#/$defs/text"}, {"type": "null"}]}, "1", "1"),
  ({"$ref": "#/$defs/loop"}, "1", 1),
  (deep("string", 20), "1", "1"),
  (deep("string", 5000), "1", 1),  # deeper than the reader looks
  ({"$ref": "#/$defs/missing"}, "1", 1),
  ({"$ref": "https://example.com/text"}, "1", 1),
  ({"$ref": 3, "allOf": {}, "enum": "x"}, "1", 1),
]


@pytest.mark.parametrize("schema, text, value", TYPED, ids=range(len(TYPED)))
@pytest.mark.parametrize("form", ["qwen3_coder", "glm4"])
def test_types_that_other_keys_of_a_schema_name(form, schema, text, value):
  loop = {"anyOf": [{"$ref": "#/$defs/loop"}] * 99, "allOf": [{"$ref": "#/$defs/loop"}]}
  tool = {
    "properties": {"a": schema},
    "$defs": {"text": {"enum": ["1"]}, "loop": loop},
    "definitions": {"a/b": {"type": "string"}},
  }
  write = {"qwen3_coder": qwen, "glm4": glm}[form]
  reader = FORMATS[form].reader({"add": tool})
  (call,) = (reader.push(write(a=text)) + reader.end()).calls
  assert json.loads(call.arguments) == {"a": value}


@pytest.mark.parametrize("after", ["", "\n", " Now?", "\n</tool_call>"])
def test_qwen3_coder_without_its_opening_tag(after):
  call = qwen(text="7").removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
  said = after.removesuffix("\n</tool_call>")
  wanted = ("I add." + said).strip(), [("add", {"text": "7"})]
  assert read("qwen3_coder", f"I add.\n{call}{after}") == wanted
  twice = [("add", {"text": "7"})] * 2
  assert read("qwen3_coder", call + after + qwen(text="7")) == (said.rstrip(), twice)


def test_the_end_mark_in_a_value_is_a_part_of_it():
  value = "</tool_call>\n</function>"
  assert read("qwen3_coder", qwen(text=value)) == ("", [("add", {"text": value})])
  assert read("glm4", glm(text=value)) == ("", [("add", {"text": value})])
  mark = "</function_calls>"
  calls = f"<function_calls>add(text={mark!r})\nadd(){mark}"
  assert read("olmo3", calls) == ("", [("add", {"text": mark}), ("add", {})])
  assert read("olmo3", calls.replace("'", '"""')) == read("olmo3", calls)
  mark = "<tool_call|>"
  calls = f'<|tool_call>call:add{{text:<|"|>{mark}<|"|>}}{mark}'
  assert read("gemma4", calls) == ("", [("add", {"text": mark})])


def test_more_end_marks_in_a_value_than_are_looked_at():
  call = qwen(text="</tool_call>" * 20)
  called = ("\nSo.", [("add", {"text": "</tool_call>" * 20})] * 2)
  assert read("qwen3_coder", f"{call}\n{call}\nSo.") == called


def test_without_new_lines():
  assert read("glm4", glm("add", "", text=" 7", count=" 7")) == (
    "",
    [("add", {"text": " 7", "count": 7})],
  )
  text = (
    "<tool_call><function=add><parameter=text> 7</parameter></function></tool_call>"
  )
  assert read("qwen3_coder", text) == ("", [("add", {"text": " 7"})])


@pytest.mark.parametrize("write", [qwen, glm], ids=["qwen3_coder", "glm4"])
def test_a_parameter_without_its_end_takes_in_nothing(write):
  form = {qwen: "qwen3_coder", glm: "glm4"}[write]
  ends = {qwen: ["\n</parameter>"], glm: ["</arg_value>", "</arg_key>"]}[write]
  for end, broken in itertools.product(ends, (write(text="7"), write(text="7", b="8"))):
    for cut in (broken.replace(end, "", 1), broken.replace(end + "\n", "", 1)):
      assert read(form, cut) == (cut, [])
      assert read(form, f"{cut}\n{write(count=3)}") == (cut, [("add", {"count": 3})])


def mark(words):
  return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


def deepseek(*calls):
  body = "\n".join(
    mark("tool call begin") + call + mark("tool call end") for call in calls
  )
  return mark("tool calls begin") + body + mark("tool calls end")


def test_deepseek_v3():
  sep = mark("tool sep")
  fenced = f'function{sep}add\n```json\n{{"count": 7}}\n```'
  text = "I add." + deepseek(fenced, f'sub{sep}{{"a": {{"b": 1}}}}')
  calls = [("add", {"count": 7}), ("sub", {"a": {"b": 1}})]
  assert read("deepseek_v3", text) == ("I add.", calls)
  assert format_of(mark("tool calls begin")) == "deepseek_v3"


@pytest.mark.parametrize(
  ("tool_format", "text"),
  [
    ("qwen3_coder", '<tool_call>{"name": "add", "arguments": {}}</tool_call>'),
    ("qwen3_coder", "<tool_call><function=add>7</function></tool_call>"),
    ("qwen3_coder", "<tool_call><function=add><parameter=a>7</function></tool_call>"),
    ("qwen3_coder", "<tool_call><function=></function></tool_call>"),
    ("glm4", "<tool_call>add 7</tool_call>"),
    ("glm4", "<tool_call>add<arg_key>a</arg_key></tool_call>"),
    ("glm4", "<tool_call> </tool_call>"),
    ("deepseek_v3", deepseek()),
    ("deepseek_v3", deepseek("add")),
    ("deepseek_v3", deepseek("add" + mark("tool sep") + "[7]")),
  ],
)
def test_what_is_no_call_stays_text(tool_format, text):
  assert read(tool_format, text) == (text, [])


def test_formats_of_the_families():
  assert format_of("<tool_call>\n<function=" + "x>") == "qwen3_coder"
  assert format_of("<tool_call>{{ x }}<arg_key>") == "glm4"
