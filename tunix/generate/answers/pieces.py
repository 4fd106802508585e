"""Settled parts of a model's answer, and the interface of the readers of answers."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Protocol


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolCall:
  """One call of a tool.

  Attributes:
    id: fresh id of the call.
    name: name of the function.
    arguments: its arguments as JSON text.
  """

  id: str
  name: str
  arguments: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
  """Settled text.

  Attributes:
    reasoning: text between <think> and </think>.
    content: text of the answer.
    calls: calls of tools.
    malformed: opening mark of a call that could not be read and is a part of `content`;
      empty if there is none.
  """

  reasoning: str = ""
  content: str = ""
  calls: tuple[ToolCall, ...] = ()
  malformed: str = ""

  def __add__(self, other: Piece) -> Piece:
    return Piece(
      reasoning=self.reasoning + other.reasoning,
      content=self.content + other.content,
      calls=self.calls + other.calls,
      malformed=self.malformed or other.malformed,
    )

  def __bool__(self) -> bool:
    return bool(self.reasoning or self.content or self.calls or self.malformed)


class Reader(Protocol):
  """A reader of growing text.

  It returns the part that no further text can change. Text that may become a tag is
  held back. The pieces of a stream, joined, equal the result for the whole text.
  """

  def push(self, text: str) -> Piece:
    """Takes new text and returns the settled part."""
    ...

  def end(self) -> Piece:
    """Returns the text that was held back, after the last `push`."""
    ...


def held_back(text: str, tag: str) -> int:
  """Returns the number of characters at the end that may begin a tag."""
  for size in range(min(len(tag) - 1, len(text)), 0, -1):
    if tag.startswith(text[-size:]):
      return size
  return 0


def new_call_id() -> str:
  """Returns a fresh id in the form of OpenAI's."""
  return f"call_{secrets.token_hex(12)}"
