"""The answer of a model, from its tokens to reasoning, text and calls of tools."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from tunix.generate.answers.formats import ToolFormat, Tools
from tunix.generate.answers.pieces import Piece
from tunix.generate.answers.reasoning import (
  THINK_TOKENS,
  ReasoningReader,
  opens_reasoning,
)
from tunix.generate.tokenizer_adapter import TokenizerAdapter


class AnswerReader:
  """Reads one answer, whole or as it grows.

  The server and episodes both read with this class, so a policy is trained on the
  messages that clients get.

  Args:
    tokenizer: tokenizer of the model.
    tool_format: form of the calls, see `formats.format_for`.
    tools: JSON schemas of the arguments, by name of the tool.
    prompt: text of the prompt, whose end may open the reasoning; None: reasoning is
      not split off.

  Attributes:
    problem: description of the first call that could not be read; None before one.
  """

  problem: str | None = None

  def __init__(
    self,
    tokenizer: TokenizerAdapter,
    tool_format: ToolFormat,
    tools: Tools,
    prompt: str | None,
  ):
    self._format, self._reader = tool_format, tool_format.reader(tools)
    marks = tool_format.marks
    if prompt is not None:
      self._reader = ReasoningReader(self._reader, opens_reasoning(prompt))
      marks = (*marks, *THINK_TOKENS)
    self._marked = MarkedText(tokenizer, marks)

  def push(self, tokens: Sequence[int] | np.ndarray, text: str, is_last: bool) -> Piece:
    """Takes new tokens and returns the part of the answer that they settle.

    Args:
      tokens: ids [n].
      text: their text without special tokens.
      is_last: the answer ends with them.
    """
    piece = self._reader.push(self._marked.push(tokens, text, is_last))
    if is_last:
      piece += self._reader.end()
    if piece.malformed and self.problem is None:
      self.problem = self._format.problem(piece.malformed)
    return piece


class MarkedText:
  """Adds marks such as [TOOL_CALLS] to a text without special tokens.

  Up to the first mark the text is the given one. From there on it is decoded from the
  tokens, so a stop string inside a tool call ends it, and stays in its text.
  """

  def __init__(self, tokenizer: TokenizerAdapter, marks: Collection[str]):
    special = tokenizer.special_tokens()
    self._decode = tokenizer.decode
    self._marks = {special[text]: text for text in marks if text in special}
    # An end-of-sequence token may be no special token, and has no text either.
    self._without_text = tokenizer.special_ids() - self._marks.keys()
    self._tokens: list[int] = []
    self._sent, self._is_marked = 0, False

  def push(self, tokens: Sequence[int] | np.ndarray, text: str, is_last: bool) -> str:
    """Returns the new text; for the arguments see `AnswerReader.push`."""
    if not self._marks:
      return text
    new = [int(token) for token in tokens]
    self._tokens += [token for token in new if token not in self._without_text]
    self._is_marked = self._is_marked or any(token in self._marks for token in new)
    if not self._is_marked:
      self._sent += len(text)
      return text
    text = self._text(self._tokens)
    if not is_last:
      text = text.rstrip("\ufffd")  # an incomplete character
    sent, self._sent = self._sent, max(self._sent, len(text))
    return text[sent:]

  def _text(self, tokens: Sequence[int]) -> str:
    text, start = "", 0
    for place, token in enumerate(tokens):
      if token in self._marks:
        text += self._decode(tokens[start:place]) + self._marks[token]
        start = place + 1
    return text + self._decode(tokens[start:])
