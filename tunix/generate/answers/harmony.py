"""Tool calls and channels of gpt-oss (the "harmony" format).

An answer is a sequence of messages:

    <|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>text<|return|>

The first `<|start|>assistant` is part of the prompt. The recipient `to=...` may stand
before the channel too.
"""

from __future__ import annotations

import re

from tunix.generate.answers.call_json import (
  closing_mark,
  ends_in_text,
  json_object,
  read_json,
  tool_call,
)
from tunix.generate.answers.pieces import Piece, held_back

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CLOSING = ("<|end|>", "<|call|>", "<|return|>", START)
# The special tokens that a text must keep for this reader.
MARKS = (CHANNEL, MESSAGE, "<|constrain|>", *CLOSING)

_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_CLOSING = re.compile("|".join(map(re.escape, CLOSING)))
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
      mark = self._closing()
      if mark is None:
        return piece + self._settled()
      piece += self._finish(mark)

  def end(self) -> Piece:
    piece = Piece()
    while not self._is_header and json_object(self._text) is None:
      # A text without an end, or with many marks inside, hides the mark from `push`.
      mark = _CLOSING.search(self._text, self._value_end())
      if mark is None:
        break
      piece += self._finish(mark) + self.push("")
    return piece + self._last()

  def _last(self) -> Piece:
    if self._is_header:
      # A cut-off header is dropped; text that never had one is the answer.
      is_text = self._is_first and not self._looks_like_header()
      text, self._text = self._text, ""
      malformed = "" if is_text else _recipient_mark(text)
      return Piece(content=text if is_text else "", malformed=malformed)
    body, self._text = self._text, ""
    return self._message(body)

  def _closing(self) -> re.Match[str] | None:
    """Returns the mark that closes a message; inside a text of a call it is text."""
    is_open = ends_in_text if self._name is not None else lambda text: False
    return closing_mark(_CLOSING.finditer(self._text), self._text, is_open, json_object)

  def _value_end(self) -> int:
    """Returns the place after the arguments of a call; 0 without any."""
    try:
      return len(self._text) - len(read_json(self._text)[1]) if self._name else 0
    except ValueError:
      return 0

  def _finish(self, mark: re.Match[str]) -> Piece:
    """Returns the rest of the message before a mark, and keeps the text after it."""
    piece = self._message(self._text[: mark.start()])
    # <|start|> without the end of the message before it begins the next one.
    self._text = self._text[mark.start() if mark[0] == START else mark.end() :]
    self._is_header, self._header, self._is_first = True, "", False
    return piece

  def _read_header(self) -> bool:
    """Reads a header; returns False if more text is needed."""
    header, mark, rest = self._text.partition(MESSAGE)
    if not self._looks_like_header():
      self._is_header = False  # text without a header
    elif mark:
      self._header, self._text, self._is_header = header, rest, False
    return not self._is_header

  def _looks_like_header(self) -> bool:
    start = self._text.lstrip()
    if not self._is_first:
      return True
    return any(start.startswith(x) or x.startswith(start) for x in _OPENINGS)

  @property
  def _name(self) -> str | None:
    recipient = _RECIPIENT.search(self._header)
    return None if recipient is None else recipient[1]

  def _settled(self) -> Piece:
    """Returns the part of an open message that cannot become a mark."""
    if self._name is not None:
      return Piece()
    held = max(held_back(self._text, mark) for mark in CLOSING)
    body = self._text[: len(self._text) - held]
    self._text = self._text[len(body) :]
    return self._channel_piece(body)

  def _message(self, body: str) -> Piece:
    """Returns the rest of a message that is complete."""
    name = self._name
    if name is None:
      return self._channel_piece(body)
    arguments = json_object(body)
    call = None if arguments is None else tool_call(name, arguments)
    if call is None:
      content = f"{self._header}{MESSAGE}{body}"
      return Piece(content=content, malformed=_recipient_mark(self._header))
    return Piece(calls=(call,))

  def _channel_piece(self, text: str) -> Piece:
    channel = _CHANNEL_NAME.search(self._header)
    if channel is not None and channel[1] == "analysis":
      return Piece(reasoning=text)
    return Piece(content=text)


def _recipient_mark(header: str) -> str:
  """Returns the recipient of a call as its header shows it; empty without one."""
  recipient = _RECIPIENT.search(header)
  return "" if recipient is None else recipient[0]
