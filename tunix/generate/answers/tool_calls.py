"""Reasoning and tool calls in a model's text.

Each reader takes the text as it grows and returns the part that no further text can
change. Text that may become a tag is held back. The pieces of a stream, joined, equal
the result for the whole text.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tunix.generate.answers.gemma_calls import (
  GEMMA_CALL as GEMMA_CALL,
  GEMMA_MARKS as GEMMA_MARKS,
  gemma4_reader,
)
from tunix.generate.answers.harmony import CHANNEL, HarmonyReader
from tunix.generate.answers.json_calls import json_calls, tool_call
from tunix.generate.answers.marked_calls import (
  CLOSE_CALL as CLOSE_CALL,
  CODE as CODE,
  GRANITE_CALLS as GRANITE_CALLS,
  MISTRAL_CALLS as MISTRAL_CALLS,
  MISTRAL_MARKS as MISTRAL_MARKS,
  OLMO_CALLS as OLMO_CALLS,
  OLMO_END as OLMO_END,
  OPEN_CALL as OPEN_CALL,
  PHI_CALLS as PHI_CALLS,
  PHI_TOOLS_END,
  granite_reader,
  hermes_reader,
  mistral_reader,
  olmo3_reader,
  phi4_mini_reader,
  smollm3_code_reader,
)
from tunix.generate.answers.pieces import (
  Piece as Piece,
  Reader as Reader,
  ToolCall as ToolCall,
  held_back,
)
from tunix.generate.answers.tagged_calls import (
  DEEPSEEK_CALLS as DEEPSEEK_CALLS,
  DEEPSEEK_MARKS as DEEPSEEK_MARKS,
  GLM_KEY,
  QWEN_FUNCTION,
  deepseek_v3_reader,
  glm4_reader,
  qwen3_coder_reader,
)

OPEN_THINK, CLOSE_THINK = "<think>", "</think>"
# Marks around the reasoning; Mistral's models and Gemma 4 have their own.
THINK_MARKS = {
  OPEN_THINK: CLOSE_THINK,
  "[THINK]": "[/THINK]",
  "<|channel>thought": "<channel|>",
}
# The parts of these marks that are special tokens in some vocabularies.
THINK_TOKENS = (
  *(OPEN_THINK, CLOSE_THINK),
  *("[THINK]", "[/THINK]"),
  *("<|channel>", "<channel|>"),
)
PYTHON_TAG = "<|python_tag|>"


def _trailing(text: str) -> int:
  """Returns the number of characters of white space at the end."""
  return len(text) - len(text.rstrip())


class PlainReader:
  """Takes all text as the answer."""

  def push(self, text: str) -> Piece:
    return Piece(content=text)

  def end(self) -> Piece:
    return Piece()


class ReasoningReader:
  """Splits reasoning off; another reader takes the rest.

  The reasoning begins with a mark of `THINK_MARKS` at the start of the answer, or with
  <think> at the end of the prompt. Later tags are text. White space around it is
  dropped.
  """

  def __init__(self, rest: Reader, is_open: bool):
    self._rest, self._text, self._close = rest, "", CLOSE_THINK
    self._state = "inside" if is_open else "before"
    self._is_first = True

  def push(self, text: str) -> Piece:
    self._text += text
    if self._state == "before":
      self._look_for_open()
    reasoning = self._inside() if self._state == "inside" else ""
    if self._state == "gap":  # between </think> and the answer
      self._text = self._text.lstrip()
      self._state = "after" if self._text else "gap"
    if self._state != "after":
      return Piece(reasoning=reasoning)
    text, self._text = self._text, ""
    return Piece(reasoning=reasoning) + self._rest.push(text)

  def end(self) -> Piece:
    left, self._text = self._text, ""
    if self._state == "inside":
      return Piece(reasoning=left.rstrip()) + self._rest.end()
    return self._rest.push(left) + self._rest.end()

  def _look_for_open(self) -> None:
    start = self._text.lstrip()
    for mark, close in THINK_MARKS.items():
      if start.startswith(mark):
        self._state, self._text = "inside", start[len(mark) :]
        self._close = close
        return
    if not any(mark.startswith(start) for mark in THINK_MARKS):
      self._state = "after"

  def _inside(self) -> str:
    text = self._text.lstrip() if self._is_first else self._text
    thought, tag, rest = text.partition(self._close)
    if tag:
      self._state, self._text = "gap", rest
      return thought.rstrip()
    held = held_back(text, self._close)
    held += _trailing(text[: len(text) - held])
    settled, self._text = text[: len(text) - held], text[len(text) - held :]
    self._is_first = self._is_first and not settled
    return settled


class Llama3Reader:
  """Reads {"name": ..., "parameters": {...}} as the whole answer.

  Several calls are separated by semicolons. JSON that names none of the tools is text,
  and so is all that follows a call.
  """

  def __init__(self, tools: Collection[str]):
    self._tools, self._text, self._is_text = frozenset(tools), "", False

  def push(self, text: str) -> Piece:
    self._text += text
    start = self._text.lstrip()
    if not self._is_text and (
      start.startswith(("{", PYTHON_TAG)) or PYTHON_TAG.startswith(start)
    ):
      return Piece()
    self._is_text = True
    text, self._text = self._text, ""
    return Piece(content=text)

  def end(self) -> Piece:
    text, self._text = self._text, ""
    calls: list[ToolCall] = []
    rest = text.strip().removeprefix(PYTHON_TAG)
    while found := json_calls(rest):
      made = [tool_call(*call) for call in found[0] if call[0] in self._tools]
      if not made or len(made) < len(found[0]) or None in made:
        break
      calls += filter(None, made)
      rest = found[1].lstrip(" \n\t;")
    return Piece(content=rest, calls=tuple(calls)) if calls else Piece(content=text)


def tool_reader(tool_format: str, tools: Collection[str]) -> Reader:
  """Returns the reader of a format.

  Args:
    tool_format: a key below, such as "hermes" or "none".
    tools: names of the tools, or a mapping from them to the JSON schemas of their
      arguments. Formats that print texts without quotes look up the types there.
  """
  readers = {
    "deepseek_v3": deepseek_v3_reader,
    "gemma4": gemma4_reader,
    "glm4": lambda: glm4_reader(tools),
    "granite": granite_reader,
    "harmony": HarmonyReader,
    "hermes": hermes_reader,
    "llama3": lambda: Llama3Reader(tools),
    "mistral": mistral_reader,
    "olmo3": olmo3_reader,
    "phi4_mini": phi4_mini_reader,
    "qwen3_coder": lambda: qwen3_coder_reader(tools),
    "smollm3_code": smollm3_code_reader,
    "none": PlainReader,
  }
  return readers[tool_format]()


def format_of(template: Any) -> str:
  """Returns the format of tool calls that a chat template shows, or "none".

  Args:
    template: jinja source, or sources by name, or None.
  """
  source = template if isinstance(template, str) else "".join((template or {}).values())
  # The first mark that occurs decides; several formats stand between <tool_call> tags.
  marks = {MISTRAL_CALLS: "mistral", QWEN_FUNCTION: "qwen3_coder", GLM_KEY: "glm4"}
  marks |= {DEEPSEEK_CALLS: "deepseek_v3", GEMMA_CALL: "gemma4", OPEN_CALL: "hermes"}
  marks['"parameters":'] = "llama3"
  marks[PYTHON_TAG] = "llama3"
  marks[CHANNEL + "final"] = "harmony"
  marks |= {GRANITE_CALLS: "granite", OLMO_CALLS: "olmo3"}
  marks[PHI_TOOLS_END] = "phi4_mini"
  return next((name for mark, name in marks.items() if mark in source), "none")


def opens_reasoning(prompt: str) -> bool:
  """Returns True if the text of a prompt ends inside <think>."""
  return prompt.rstrip().endswith(OPEN_THINK)
