"""Tool calls of Llama 3, which are the whole answer.

    {"name": "add", "parameters": {"a": 3}}; {"name": "add", "parameters": {"a": 4}}

A mark may stand before each call.
"""

from __future__ import annotations

from collections.abc import Collection

from tunix.generate.answers.call_json import json_calls, tool_call
from tunix.generate.answers.pieces import Piece, ToolCall

PYTHON_TAG = "<|python_tag|>"


class Llama3Reader:
  """Reads {"name": ..., "parameters": {...}} as the whole answer.

  Several calls are separated by semicolons. JSON that names none of the tools is text,
  and so is all that follows a call.
  """

  def __init__(self, tools: Collection[str]):
    self._tools, self._text, self._is_text = frozenset(tools), "", False
    self._last = ""  # characters before the next text that may begin the mark

  def push(self, text: str) -> Piece:
    self._text += text
    start = self._text.lstrip()
    if not self._is_text and (
      start.startswith(("{", PYTHON_TAG)) or PYTHON_TAG.startswith(start)
    ):
      return Piece()
    self._is_text = True
    text, self._text = self._text, ""
    recent, self._last = self._last + text, (self._last + text)[1 - len(PYTHON_TAG) :]
    return Piece(content=text, malformed=PYTHON_TAG if PYTHON_TAG in recent else "")

  def end(self) -> Piece:
    text, self._text = self._text, ""
    calls: list[ToolCall] = []
    rest = text.strip()
    while block := json_calls(rest.removeprefix(PYTHON_TAG)):
      read = [tool_call(*call) for call in block[0] if call[0] in self._tools]
      if not read or len(read) < len(block[0]) or None in read:
        break
      calls += filter(None, read)
      rest = block[1].lstrip(" \n\t;")
    content = rest if calls else text
    return Piece(content=content, calls=tuple(calls), malformed=_call_mark(content))


def _call_mark(content: str) -> str:
  """Returns the mark with which a text begins a call; empty if it begins none."""
  if content.lstrip().startswith("{") and '"name"' in content:
    return "{"
  return PYTHON_TAG if PYTHON_TAG in content else ""
