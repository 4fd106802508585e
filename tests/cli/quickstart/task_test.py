"""Answers are checked against the signature alone."""

import dataclasses

import pytest

from tunix.cli.quickstart import task
from tunix.cli.quickstart.stdlib import Function
from tunix.cli.quickstart.task import Check

SHORTEN = Function(
  module="textwrap",
  name="shorten",
  arguments=("text", "width", "kwargs"),
  signature="def shorten(text, width, **kwargs)",
  doc="Collapse and truncate the given text.\n\nMore.",
  summary="Collapse and truncate the given text.",
)
ANSWER = (
  "Name: shorten\nArguments: text, width, kwargs\n"
  "Summary: Collapse and truncate the given text."
)


def test_the_record_asks_for_the_answer():
  user, assistant = task.record(SHORTEN)["messages"]
  assert user == {"role": "user", "content": SHORTEN.signature}
  assert assistant == {"role": "assistant", "content": ANSWER}


@pytest.mark.parametrize(
  "text, expected",
  [
    (ANSWER, (True, True, True)),
    (ANSWER + "\n", (True, True, True)),
    (ANSWER.replace("shorten", "short"), (True, False, True)),
    (ANSWER.replace("width, ", ""), (True, True, False)),
    (ANSWER.replace("Summary", "Summery"), (False, False, False)),
    (ANSWER + "\nSummary: more", (False, False, False)),
    (ANSWER.replace("Name: shorten", "Name: "), (False, False, False)),
    ("", (False, False, False)),
  ],
)
def test_check(text, expected):
  assert dataclasses.astuple(task.check(SHORTEN.signature, text)) == expected


def test_a_function_without_arguments_has_none():
  bare = dataclasses.replace(
    SHORTEN, arguments=(), signature="def shorten()", summary="Shorten something."
  )
  assert "Arguments: none\n" in task.answer(bare)
  assert task.check(bare.signature, task.answer(bare)).arguments
  assert not task.check(bare.signature, ANSWER).arguments


def test_arguments_keep_the_order_of_the_signature():
  signature = "def f(a, /, b, *c, d, **e)"
  right = "Name: f\nArguments: a, b, c, d, e\nSummary: Something."
  assert task.check(signature, right).arguments
  assert not task.check(signature, right.replace("c, d", "d, c")).arguments


@pytest.mark.parametrize(
  "change",
  [
    {"summary": "Short."},
    {"summary": "x" * 121},
    {"summary": "Über alles und jedes."},
    {"summary": "(internal) do something"},
    {"signature": "def shorten(" + "x" * 120 + ")"},
  ],
)
def test_unsuitable_functions(change):
  assert task.is_suitable(SHORTEN)
  assert not task.is_suitable(dataclasses.replace(SHORTEN, **change))


def test_share():
  good, bad = (Check(format=x, name=x, arguments=x) for x in (True, False))
  assert task.share([good, bad, bad, bad], "format") == 0.25
  assert task.share([], "format") == 0.0
