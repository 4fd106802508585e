"""Reader of gpt-oss's answers (the "harmony" format): channels and calls of tools.

An answer is a sequence of messages:

    <|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>text<|return|>

The first `<|start|>assistant` is part of the prompt. The recipient `to=...` may stand
before the channel too.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tunix.generate.answer_pieces import Piece, ToolCall, held_back, new_call_id

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CLOSING = ("<|end|>", "<|call|>", "<|return|>", START)
# The special tokens that a text must keep for this reader.
MARKS = (CHANNEL, MESSAGE, "<|constrain|>", *CLOSING)

_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_OPENINGS = (CHANNEL, START, "to=", "assistant")


class HarmonyReader:
  """Splits an answer into reasoning, text and calls of tools.

  Messages of the channel "analysis" are reasoning. Messages to a function are calls;
  one whose body is no JSON object stays text. All other messages are text. So is an
  answer without a header.
  """

  def __init__(self):
    self._text, self._header = "", ""
    self._is_header = True
    self._is_first = True

  def push(self, text: str) -> Piece:
    self._text += text
    piece = Piece()
    while True:
      if self._is_header and not self._read_header():
        return piece
      found = _first(self._text, CLOSING)
      if found is None:
        return piece + self._settled()
      place, mark = found
      piece += self._message(self._text[:place])
      rest = self._text[place:]
      # <|start|> without the end of the message before it begins the next one.
      self._text = rest if mark == START else rest[len(mark) :]
      self._is_header, self._header, self._is_first = True, "", False

  def end(self) -> Piece:
    if self._is_header:
      # A cut-off header is dropped; text that never had one is the answer.
      text = self._text if self._is_first and not self._looks_like_header() else ""
      self._text = ""
      return Piece(content=text)
    body, self._text = self._text, ""
    return self._message(body)

  def _read_header(self) -> bool:
    """Reads a header; returns False if more text is needed."""
    header, mark, rest = self._text.partition(MESSAGE)
    if mark:
      self._header, self._text, self._is_header = header, rest, False
      return True
    if self._looks_like_header():
      return False
    self._is_header = False  # text without a header
    return True

  def _looks_like_header(self) -> bool:
    start = self._text.lstrip()
    if not self._is_first:
      return True
    return any(start.startswith(x) or x.startswith(start) for x in _OPENINGS)

  @property
  def _name(self) -> str | None:
    found = _RECIPIENT.search(self._header)
    return None if found is None else found[1]

  def _settled(self) -> Piece:
    """Returns the part of an open message that cannot become a mark."""
    if self._name is not None:
      return Piece()
    held = max(held_back(self._text, mark) for mark in CLOSING)
    settled = self._text[: len(self._text) - held]
    self._text = self._text[len(settled) :]
    return self._said(settled)

  def _message(self, body: str) -> Piece:
    """Returns the rest of a message that is complete."""
    name = self._name
    if name is None:
      return self._said(body)
    arguments = _object(body)
    if arguments is None:
      return Piece(content=f"{self._header}{MESSAGE}{body}")
    call_id = new_call_id()
    text = json.dumps(arguments, ensure_ascii=False)
    return Piece(calls=(ToolCall(id=call_id, name=name, arguments=text),))

  def _said(self, text: str) -> Piece:
    channel = _CHANNEL_NAME.search(self._header)
    if channel is not None and channel[1] == "analysis":
      return Piece(reasoning=text)
    return Piece(content=text)


def _first(text: str, marks: tuple[str, ...]) -> tuple[int, str] | None:
  """Returns the place of the first of the marks in a text, and the mark."""
  found = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
  return min(found, default=None)


def _object(text: str) -> dict[str, Any] | None:
  """Returns the JSON object of a text; None if it is none."""
  try:
    value = json.loads(text)
  except (ValueError, RecursionError):
    return None
  return value if isinstance(value, dict) else None
