import dataclasses
import itertools
import json

import hypothesis
import pytest
from hypothesis import strategies as st

from tunix.generate.answers.formats import FORMATS, format_of
from tunix.generate.answers.pieces import Piece
from tunix.generate.answers.reasoning import PlainReader, ReasoningReader

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def read(reader, *parts):
  piece = Piece()
  for part in parts:
    piece += reader.push(part)
  return piece + reader.end()


def calls(piece):
  return [(call.name, json.loads(call.arguments)) for call in piece.calls]


def test_reasoning_is_split_off():
  piece = read(
    ReasoningReader(PlainReader(), False), "\n<think>\na b\n</think>\n\nc d\n"
  )
  assert (piece.reasoning, piece.content) == ("a b", "c d\n")
  opened = read(ReasoningReader(PlainReader(), True), "a b</think>c")
  assert (opened.reasoning, opened.content) == ("a b", "c")
  unclosed = read(ReasoningReader(PlainReader(), False), "<think>a b ")
  assert (unclosed.reasoning, unclosed.content) == ("a b", "")


def test_tags_inside_an_answer_are_text():
  text = " so <think> is a tag, </think> too"
  piece = read(ReasoningReader(PlainReader(), False), text)
  assert (piece.reasoning, piece.content) == ("", text)


def test_hermes_calls():
  piece = read(FORMATS["hermes"].reader(()), f"I add.\n{CALL}\n{CALL}")
  assert piece.content == "I add."
  assert calls(piece) == [("add", {"a": 1})] * 2
  assert len({call.id for call in piece.calls}) == 2
  for between in ("\n", " ", ""):  # several calls between one pair of marks
    together = f"{CALL}\n{CALL}".replace("\n</tool_call>\n<tool_call>\n", between)
    assert (
      calls(read(FORMATS["hermes"].reader(()), together)) == [("add", {"a": 1})] * 2
    )
    assert read(FORMATS["hermes"].reader(()), together).content == ""
  unclosed = read(FORMATS["hermes"].reader(()), CALL.removesuffix("</tool_call>"))
  assert calls(unclosed) == [("add", {"a": 1})]


@pytest.mark.parametrize(
  "body", ['{"name": 3}', "no JSON", '{"name": "a", "arguments": 3}']
)
def test_hermes_blocks_that_are_no_calls_stay_text(body):
  text = f"x <tool_call>{body}</tool_call>"
  piece = Piece(content=text, malformed="<tool_call>")
  assert read(FORMATS["hermes"].reader(()), text) == piece


def test_llama3_calls():
  one = '{"name": "add", "parameters": {"a": 1}}'
  reader = lambda: FORMATS["llama3"].reader(["add"])
  assert calls(read(reader(), f"<|python_tag|>{one}; {one}")) == [("add", {"a": 1})] * 2
  other = one.replace("add", "sub")
  assert read(reader(), other) == Piece(content=other, malformed="{")
  assert read(reader(), "{a set}") == Piece(content="{a set}")
  assert reader().push("so ").content == "so "  # text is not held back


def test_mistral_calls():
  old = 'x [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]'
  piece = read(FORMATS["mistral"].reader(()), old)
  assert piece.content == "x" and calls(piece) == [("add", {"a": 1})]
  assert len(piece.calls[0].id) == 9  # what Mistral's templates demand
  new = '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]sub{"b": {"c": 2}}'
  assert calls(read(FORMATS["mistral"].reader(()), new)) == [
    ("add", {"a": 1}),
    ("sub", {"b": {"c": 2}}),
  ]
  broken = "[TOOL_CALLS]add[ARGS]{"
  piece = Piece(content=broken, malformed="[TOOL_CALLS]")
  assert read(FORMATS["mistral"].reader(()), broken) == piece


@pytest.mark.parametrize(
  ("form", "text", "mark"),
  [
    ("harmony", "<|channel|>commentary to=functions.add", "to=functions.add"),
    ("harmony", "<|channel|>final", ""),
    ("harmony", "<|channel|>final<|message|>see to=functions.add", ""),
    ("llama3", "I call <|python_tag|>add()", "<|python_tag|>"),
    ("llama3", '{"a": 1}', ""),
    ("hermes", "so <tool_", ""),
    ("none", CALL, ""),
  ],
)
def test_the_mark_of_a_call_that_cannot_be_read(form, text, mark):
  assert read(FORMATS[form].reader(["add"]), text).malformed == mark
  assert read(FORMATS[form].reader(["add"]), *text).malformed == mark


TEXTS = st.lists(
  st.sampled_from(
    [
      *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"),
      *("<", "</th", "<tool", "[TOOL", "{", "}", "; ", "a b", "\n", " ", "é"),
      '{"name": "add", "arguments": {"a": 1}}',
      '[{"name": "add", "arguments": {}}]',
      "<|python_tag|>",
      "<|tool_call|>",
      "<function_calls>",
      "add(a=1)",
      "</function_calls>",
      *("<code>", "</code>", "<function=add>", "<parameter=a>", "</parameter>"),
      *("</function>", "<arg_key>a</arg_key>", "<arg_value>1</arg_value>"),
      *("[THINK]", "[/THINK]", '"', "\\", '"x": "', "[CALL_ID]", "functools["),
      *(', "arguments": {"a": "</tool_call>"}}', "to=functions.add<|message|>"),
      *("<|call|>", "<|start|>", "<|channel|>final<|message|>"),
    ]
  ),
  max_size=8,
).map("".join)


@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
@hypothesis.given(TEXTS, st.lists(st.integers(0, 80), max_size=8), st.booleans())
@pytest.mark.parametrize("tool_format", sorted(FORMATS))
def test_a_stream_gives_what_the_whole_text_gives(tool_format, text, cuts, is_open):
  places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
  parts = [text[a:b] for a, b in itertools.pairwise(places)]

  def reader():
    return ReasoningReader(FORMATS[tool_format].reader(["add"]), is_open)

  whole, stream = read(reader(), text), read(reader(), *parts)
  assert calls(stream) == calls(whole)
  assert dataclasses.replace(stream, calls=()) == dataclasses.replace(whole, calls=())


def test_formats_are_read_off_templates():
  assert format_of("{{ '<tool_call>' }}") == "hermes"
  assert format_of({"default": "", "tool_use": "[TOOL_CALLS]"}) == "mistral"
  assert format_of('{"name": x, "parameters": y}') == "llama3"
  assert format_of(None) == "none"
