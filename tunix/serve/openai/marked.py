"""Text of a completion with the special tokens that mark tool calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.generate.tokens import Completion, Delta


class MarkedText:
  """Adds marks such as [TOOL_CALLS] to the text of deltas, which has no special tokens.

  Up to the first mark the text is that of the deltas. From there on it is decoded from
  the tokens, so a stop string inside a tool call ends it, and stays in its text.
  """

  def __init__(self, tokenizer: TokenizerAdapter, marks: Collection[str]):
    special = tokenizer.special_tokens()
    self._decode = tokenizer.decode
    self._marks = {special[text]: text for text in marks if text in special}
    self._tokens: list[int] = []
    self._sent, self._is_marked = 0, False

  def push(self, delta: Delta | Completion) -> str:
    """Returns the new text of a delta, or that of a whole completion."""
    if not self._marks:
      return delta.text
    new = delta.ids.tolist()
    self._tokens += new
    self._is_marked = self._is_marked or any(token in self._marks for token in new)
    if not self._is_marked:
      self._sent += len(delta.text)
      return delta.text
    text = self._text(self._tokens)
    if delta.finish_reason is None:
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
