"""Rows as the host sees them while they grow: text, stop strings, why a row ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from tunix.generate.decode import Generated

_UNFINISHED = (
  "\ufffd"  # what decoders show for a character whose bytes are not all there
)

Decode = Callable[[Sequence[int] | np.ndarray], str]


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


@dataclasses.dataclass(frozen=True)
class Stop:
  """Where a stop string ends a row.

  Attributes:
    tokens: how many, up to and with the one that completes the stop string.
    text: the text before it.
  """

  tokens: int
  text: str


def find_stop(
  decode: Decode, tokens: np.ndarray, stops: Sequence[str], known: int = 0
) -> Stop | None:
  """The first place where the text of `tokens` holds one of `stops`.

  Args:
    decode: ids to text; a text that holds a stop string keeps it as it grows.
    tokens: ids of a row, without end-of-sequence tokens.
    stops: the strings.
    known: so many tokens are known to hold none.
  """

  def place(count: int) -> int:
    text = decode(tokens[:count])
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=-1)

  low, high = known, len(tokens)
  if low >= high or place(high) < 0:
    return None
  while high - low > 1:  # `low` tokens hold none, `high` do
    middle = (low + high) // 2
    low, high = (low, middle) if place(middle) >= 0 else (middle, high)
  return Stop(high, decode(tokens[:high])[: place(high)])


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
  """The first rows of a request, read as they grow.

  Attributes:
    out: the last that was read.
  """

  def __init__(
    self, decode: Decode, rows: int, stops: Sequence[str], include_eos: bool
  ):
    self._decode = decode
    self._stops = stops
    self._include_eos = include_eos
    self._found: dict[int, Stop] = {}
    self._looked = [0] * rows
    self._sent = [(0, 0) for _ in range(rows)]  # tokens, characters
    self._over: set[int] = set()
    self.out: Generated | None = None

  def read(self, out: Generated) -> None:
    """Takes what the device has written so far, and looks for stop strings."""
    self.out = out
    for row in range(len(self._looked)) if self._stops else ():
      if row in self._found:
        continue
      words = np.asarray(out.tokens[row, : self._worded(row)])
      stop = find_stop(self._decode, words, self._stops, self._looked[row])
      self._looked[row] = len(words)
      if stop is not None:
        self._found[row] = stop

  def limits(self, limits: np.ndarray) -> np.ndarray:
    """The same limits, but for rows that a stop string has ended."""
    limits = limits.copy()
    for row, stop in self._found.items():
      limits[row] = min(limits[row], stop.tokens)
    return limits

  def reason(self, row: int) -> str | None:
    """Why the row ended, None while it has not."""
    out = self._last()
    if row in self._found:
      return "stop"
    if out.stopped[row]:
      return "eos"
    return "length" if out.done[row] else None

  def _last(self) -> Generated:
    assert self.out is not None
    return self.out

  def _worded(self, row: int) -> int:
    """Tokens that are text."""
    out = self._last()
    return int(out.lengths[row]) - bool(out.stopped[row])

  def words(self, row: int) -> np.ndarray:
    """The tokens that are text, or complete a stop string."""
    stop = self._found.get(row)
    count = self._worded(row) if stop is None else stop.tokens
    return np.asarray(self._last().tokens[row, :count])

  def length(self, row: int) -> int:
    """Tokens that the caller gets."""
    eos = self._include_eos and self.reason(row) == "eos"
    return len(self.words(row)) + eos

  def text(self, row: int, prompt: np.ndarray | None = None) -> str:
    """The row's text up to a stop string; after the prompt's, when one is given."""
    words, stop = self.words(row), self._found.get(row)
    if prompt is None:
      return self._decode(words) if stop is None else stop.text
    whole = self._decode(np.concatenate([prompt, words]))
    cut = 0 if stop is None else len(self._decode(words)) - len(stop.text)
    return whole[: len(whole) - cut]

  def increment(self, row: int) -> Increment | None:
    """What the row has got since the last time; None for nothing."""
    reason = self.reason(row)
    if row in self._over:
      return None
    tokens, characters = self._sent[row]
    length, text = self.length(row), self.text(row)
    if reason is None:
      text = settled(text, self._stops)
    else:
      self._over.add(row)
    if reason is None and length == tokens and len(text) <= characters:
      return None
    self._sent[row] = length, max(characters, len(text))
    out = self._last()
    new = lambda x: None if x is None else np.array(x[row, tokens:length])
    return Increment(
      row=row,
      text=text[characters:],
      tokens=np.array(out.tokens[row, tokens:length]),
      logprobs=new(out.logps),
      sampling_logprobs=new(out.sampling_logps),
      finish_reason=reason,
    )
