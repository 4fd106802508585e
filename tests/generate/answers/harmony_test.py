import json

import pytest

from tests.generate.answers.formats_test import read
from tunix.generate.answers.formats import FORMATS, format_of
from tunix.generate.answers.harmony import HarmonyReader

THOUGHT = "<|channel|>analysis<|message|>I add.<|end|>"
CALL = (
  "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json"
  '<|message|>{"a": 1}<|call|>'
)
FINAL = "<|start|>assistant<|channel|>final<|message|>It is 1 < 2.<|return|>"


def by_letter(text):
  return read(HarmonyReader(), *text)


@pytest.mark.parametrize("split", [list, lambda text: [text]], ids=["letters", "whole"])
def test_channels_and_calls(split):
  piece = read(HarmonyReader(), *split(THOUGHT + CALL + FINAL))
  assert (piece.reasoning, piece.content) == ("I add.", "It is 1 < 2.")
  (call,) = piece.calls
  assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})


def test_the_recipient_may_stand_before_the_channel():
  piece = by_letter(' to=functions.add<|channel|>commentary json<|message|>{"a": 1}')
  assert [call.name for call in piece.calls] == ["add"] and not piece.content


def test_text_is_settled_as_it_grows():
  reader = HarmonyReader()
  assert not reader.push("<|channel|>final<|mess")
  assert reader.push("age|>It is <|en").content == "It is "
  assert reader.push("code|>").content == "<|encode|>"
  assert not reader.end()


@pytest.mark.parametrize(
  "text, content",
  [
    ("just text", "just text"),
    ("to be", "to be"),
    ("<|channel|>final<|message|>cut of", "cut of"),
    ("<|channel|>final", ""),
    ("<|channel|>commentary<|message|>First.<|end|>" + FINAL, "First.It is 1 < 2."),
    (
      " to=functions.add<|message|>no JSON<|call|>",
      " to=functions.add<|message|>no JSON",
    ),
  ],
)
def test_other_answers(text, content):
  assert by_letter(text).content == read(HarmonyReader(), text).content == content


def test_the_format_is_read_off_the_template():
  template = "{{- '<|start|>assistant<|channel|>final<|message|>' }}"
  assert format_of(template) == "harmony"
  assert isinstance(FORMATS["harmony"].reader(()), HarmonyReader)
