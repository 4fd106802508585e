"""Rows of a running request as the host reads them: ends, stop strings, increments."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tunix.generate import outputs
from tunix.generate.drawing import stops as stops_lib
from tunix.generate.drawing.options import SamplingOptions
from tunix.generate.outputs import Decode
from tunix.generate.padded.decode import Generated

_UNFINISHED = "\ufffd"  # Decoders return this character for incomplete bytes.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Increment:
  """The new part of a row since its last increment.

  Attributes:
    row: number of the row, as in the output of a call.
    text: new text. The texts of a row, concatenated, are the text of a call.
    tokens: int32 [n], new tokens.
    logprobs: float32 [n] or None, as in SamplerOutput.
    sampling_logprobs: float32 [n] or None, as in SamplerOutput.
    finish_reason: as in SamplerOutput in the last increment of a row; None before.
  """

  row: int
  text: str
  tokens: np.ndarray
  logprobs: np.ndarray | None = None
  sampling_logprobs: np.ndarray | None = None
  finish_reason: str | None = None


def settled(text: str, stops: Sequence[str]) -> str:
  """Returns the part of a growing text that no further token can change.

  An incomplete character at the end, and an end that may begin a stop string, are
  left out.
  """
  text = text.rstrip(_UNFINISHED)
  return text[: len(text) - stops_lib.compiled(stops).held(text)]


class RowReader:
  """Reads the rows of a request while they grow.

  The completions themselves stay in `Generated`. This class stores what only the host
  knows: where a stop string ends a row, and which part of a row `increment` has already
  returned.

  Args:
    decode: token ids to text.
    rows: number of rows to read; the rows behind them only fill the batch.
    options: options of the call.
  """

  def __init__(self, decode: Decode, rows: int, options: SamplingOptions):
    self._decode = decode
    self._options = options
    self._stops: dict[int, int] = {}  # row -> tokens up to its stop string
    self._searched = [0] * rows  # tokens of each row without a stop string
    self._sent = [(0, 0) for _ in range(rows)]  # (tokens, characters) of a stream
    self._over: set[int] = set()
    self._out: Generated | None = None

  def read(self, out: Generated) -> None:
    """Stores the newest state of all rows and searches new text for stop strings."""
    self._out = out
    for row in range(len(self._searched)) if self._options.stops else ():
      if row in self._stops:
        continue
      # Only tokens since the last read are searched; the text before them is decoded
      # again, because a stop string may begin in it.
      ids = outputs.text_tokens(self._tokens(row), self.finish_reason(row))
      end = outputs.find_stop(
        self._decode, ids, self._options.stops, self._searched[row]
      )
      self._searched[row] = len(ids)
      if end is not None:
        self._stops[row] = end

  def limits(self, limits: np.ndarray) -> np.ndarray:
    """Returns the limits, lowered for the rows that a stop string has ended."""
    limits = limits.copy()
    for row, end in self._stops.items():
      limits[row] = min(limits[row], end)
    return limits

  def finish_reason(self, row: int) -> str | None:
    """Returns "stop", "eos" or "length"; None while the row grows."""
    out = self._generated()
    if row in self._stops:
      return "stop"
    if out.stopped[row]:
      return "eos"
    return "length" if out.done[row] else None

  def columns(self) -> dict[str, Any]:
    """Returns all rows as last read: the columns of `outputs.sampler_output`."""
    out, rows = self._generated(), range(len(self._searched))
    cut = lambda x: None if x is None else [self._cut(x, row) for row in rows]
    return {
      "tokens": cut(out.tokens),
      "finish_reasons": [self.finish_reason(row) or "length" for row in rows],
      "logits": cut(out.logits),
      "logprobs": cut(out.logps),
      "sampling_logprobs": cut(out.sampling_logps),
    }

  def routes(self, prompts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the experts of each row's prompt and tokens, see `SamplerOutput`."""
    out, samples = self._generated(), self._options.num_samples
    assert out.routes is not None and out.prompt_routes is not None
    rows = []
    for row in range(len(self._searched)):
      before = out.prompt_routes[row // samples, -len(prompts[row // samples]) :]
      own = self._cut(out.routes, row).copy()
      own[-1:] = 0  # run only where other rows were longer
      rows.append(np.concatenate([before, own]))
    return rows

  def increment(self, row: int) -> Increment | None:
    """Returns the new part of a row since the last call; None if there is none."""
    if row in self._over:
      return None
    out, options, reason = self._generated(), self._options, self.finish_reason(row)
    ids = self._tokens(row)
    text = outputs.text_of(self._decode, ids, reason, options.stops)
    length = len(outputs.kept_tokens(ids, reason, options))
    if reason is None:
      text = settled(text, options.stops)
    else:
      self._over.add(row)
    # Characters are counted as well as tokens: text that was held back may settle
    # without a new token, and a token may add no character.
    tokens, characters = self._sent[row]
    if reason is None and length == tokens and len(text) <= characters:
      return None
    self._sent[row] = length, max(characters, len(text))
    # Copies: a view would keep the buffers of all rows alive.
    new = lambda x: None if x is None else self._cut(x, row)[tokens:length].copy()
    return Increment(
      row=row,
      text=text[characters:],
      tokens=ids[tokens:length].copy(),
      logprobs=new(out.logps),
      sampling_logprobs=new(out.sampling_logps),
      finish_reason=reason,
    )

  def _generated(self) -> Generated:
    assert self._out is not None
    return self._out

  def _tokens(self, row: int) -> np.ndarray:
    return self._cut(self._generated().tokens, row)

  def _cut(self, column: Any, row: int) -> np.ndarray:
    """Returns one row of a field up to the row's end, as a view."""
    length = self._stops.get(row, int(self._generated().lengths[row]))
    return np.asarray(column[row, :length])
