"""The text of a growing completion: stop strings, and parts for a stream.

While a completion grows, each call decodes only the end of the completion. The cost of
a call grows with the number of new tokens and not with the length of the completion.
The call at the end decodes the whole completion once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tunix.generate import outputs
from tunix.generate.drawing import stops as stops_lib
from tunix.generate.engine.request import RequestError
from tunix.generate.outputs import Decode
from tunix.generate.padded.completions import settled

# Tokens before the new ones that are decoded with them. A stop string may begin there,
# and tokenizers decode the start of a text differently from its middle.
_CONTEXT = 8


class TextReader:
  """Reads one completion.

  Args:
    decode: token ids to text.
    stops: stop strings.
    streams: return text while the completion grows, not only at its end.

  Raises:
    RequestError: the tokenizer cannot decode the tokens. All methods can raise it.
  """

  def __init__(self, decode: Decode, stops: Sequence[str], streams: bool):
    self._decode_any, self.streams = decode, streams
    self._stops = stops_lib.compiled(stops)
    self._searched = 0  # tokens whose text holds no stop string
    self._read = 0  # tokens whose text is in `_sent` or `_held`
    self._sent: list[str] = []
    self._held = ""  # text that may be the beginning of a stop string

  def find_stop(self, tokens: np.ndarray) -> int | None:
    """Returns the number of tokens up to the end of a stop string, or None.

    Args:
      tokens: all tokens of the completion so far, without an end token.
    """
    if not self._stops:
      return None
    # The longest stop string spans at most as many tokens as it has bytes.
    first = max(0, self._searched - self._stops.longest_bytes - _CONTEXT)
    clean = self._searched - first
    end = outputs.find_stop(self._decode, tokens[first:], self._stops, clean)
    self._searched = len(tokens)
    return None if end is None else first + end

  def text(self, tokens: np.ndarray, finish_reason: str | None) -> str:
    """Returns the new text since the last call.

    Args:
      tokens: all tokens of the completion so far, with an end token.
      finish_reason: why the completion ended, or None.
    """
    if finish_reason is not None:
      whole = outputs.text_of(self._decode, tokens, finish_reason, self._stops)
      sent = "".join(self._sent)
      # With more tokens, a tokenizer may decode already sent text differently. Sent
      # text cannot be taken back, so only its length counts.
      return whole[len(sent) :]
    if not self.streams:
      return ""
    first = max(0, self._read - _CONTEXT)
    before = self._decode(tokens[first : self._read])
    now = self._decode(tokens[first:])
    if now.endswith("\ufffd"):  # an incomplete character
      return ""
    self._read = len(tokens)
    self._held += now[len(before) :]
    new = settled(self._held, self._stops)
    self._held = self._held[len(new) :]
    self._sent.append(new)
    return new

  def _decode(self, tokens: Sequence[int] | np.ndarray) -> str:
    try:
      return self._decode_any(tokens)
    except Exception as error:  # tokenizers raise many kinds for ids that they lack
      raise RequestError(
        f"the tokenizer cannot decode the completion: {error!r}. A model may have more "
        "ids than its tokenizer: forbid them with logit_bias"
      ) from error
