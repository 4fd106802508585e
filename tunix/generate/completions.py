"""Rows as the host sees them while they grow: text, stop strings, why a row ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tunix.generate.decode import Generated
from tunix.generate.options import SamplingOptions
from tunix.generate.outputs import Decode, Row, find_stop

_UNFINISHED = (
  "\ufffd"  # what decoders show for a character whose bytes are not all there
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Increment:
  """What a row has got since its last increment.

  Attributes:
    row: number of the row, as in the output of a call.
    text: the new text. The texts of a row put together are the text of a call.
    tokens: int32 [n], the new tokens.
    logprobs, sampling_logprobs: float32 [n], as in SamplerOutput, or None.
    finish_reason: as in SamplerOutput in a row's last increment, None before.
  """

  row: int
  text: str
  tokens: np.ndarray
  logprobs: np.ndarray | None = None
  sampling_logprobs: np.ndarray | None = None
  finish_reason: str | None = None


def settled(text: str, stops: Sequence[str]) -> str:
  """The part of a growing text that stays, whatever comes: without a character that
  is not complete, and without what may be the beginning of a stop string."""
  text = text.rstrip(_UNFINISHED)
  longest = max(map(len, stops), default=1) - 1
  for size in range(min(longest, len(text)), 0, -1):
    if any(stop.startswith(text[-size:]) for stop in stops):
      return text[:-size]
  return text


class Completions:
  """The first rows of a request, read as they grow."""

  def __init__(self, decode: Decode, rows: int, options: SamplingOptions):
    self._decode = decode
    self._options = options
    self._stops: dict[int, int] = {}  # row -> tokens up to a stop string
    self._looked = [0] * rows
    self._sent = [(0, 0) for _ in range(rows)]  # tokens, characters
    self._over: set[int] = set()
    self._out: Generated | None = None

  def read(self, out: Generated) -> None:
    """Takes what the device has written so far, and looks for stop strings."""
    self._out = out
    for row in range(len(self._looked)) if self._options.stops else ():
      if row in self._stops:
        continue
      words = self.row(row).words
      end = find_stop(self._decode, words, self._options.stops, self._looked[row])
      self._looked[row] = len(words)
      if end is not None:
        self._stops[row] = end

  def limits(self, limits: np.ndarray) -> np.ndarray:
    """The same limits, but for rows that a stop string has ended."""
    limits = limits.copy()
    for row, end in self._stops.items():
      limits[row] = min(limits[row], end)
    return limits

  def _reason(self, row: int, out: Generated) -> str | None:
    """Why the row ended, None while it has not."""
    if row in self._stops:
      return "stop"
    if out.stopped[row]:
      return "eos"
    return "length" if out.done[row] else None

  def row(self, row: int) -> Row:
    """The row as it was last read, views of what was read."""
    out = self._out
    assert out is not None
    length = self._stops.get(row, int(out.lengths[row]))
    first = lambda x: None if x is None else np.asarray(x[row, :length])
    return Row(
      tokens=np.asarray(out.tokens[row, :length]),
      finish_reason=self._reason(row, out),
      logits=first(out.logits),
      logprobs=first(out.logps),
      sampling_logprobs=first(out.sampling_logps),
    )

  def rows(self) -> list[Row]:
    """All rows as they were last read."""
    return [self.row(row) for row in range(len(self._looked))]

  def increment(self, row: int) -> Increment | None:
    """What the row has got since the last time; None for nothing."""
    if row in self._over:
      return None
    now, options = self.row(row), self._options
    length, text = len(now.kept(options)), now.text(self._decode, options.stops)
    if now.finish_reason is None:
      text = settled(text, options.stops)
    else:
      self._over.add(row)
    tokens, characters = self._sent[row]
    if now.finish_reason is None and length == tokens and len(text) <= characters:
      return None
    self._sent[row] = length, max(characters, len(text))
    new = lambda x: None if x is None else x[tokens:length].copy()
    return Increment(
      row=row,
      text=text[characters:],
      tokens=now.tokens[tokens:length].copy(),
      logprobs=new(now.logprobs),
      sampling_logprobs=new(now.sampling_logprobs),
      finish_reason=now.finish_reason,
    )
