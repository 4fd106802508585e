"""Reasoning before a model's answer."""

from __future__ import annotations

from tunix.generate.answers.pieces import Piece, Reader, held_back

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

  Args:
    rest: reader of the text after the reasoning.
    is_open: the prompt ends with <think>.
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
    # White space before the closing mark is dropped, so that at the end waits too.
    held += _trailing(text[: len(text) - held])
    settled, self._text = text[: len(text) - held], text[len(text) - held :]
    self._is_first = self._is_first and not settled
    return settled


def opens_reasoning(prompt: str) -> bool:
  """Returns True if the text of a prompt ends inside <think>."""
  return prompt.rstrip().endswith(OPEN_THINK)


def _trailing(text: str) -> int:
  """Returns the number of characters of white space at the end."""
  return len(text) - len(text.rstrip())
