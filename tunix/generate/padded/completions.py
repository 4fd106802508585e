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
from tunix.generate.tokens import Completion, Tokens

_UNFINISHED = "\ufffd"  # Decoders return this character for incomplete bytes.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Increment(Tokens):
  """The new part of a row since its last increment.

  Attributes:
    row: number of the row, as in the output of a call.
    text: new text. The texts of a row, concatenated, are the text of a call.
    finish_reason: as in SamplerOutput in the last increment of a row; None before.
  """

  row: int
  text: str
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

  def completions(self, prompts: Sequence[np.ndarray]) -> list[Completion]:
    """Returns all rows as last read, without their texts.

    Args:
      prompts: ids of the prompts of the call.
    """
    samples = self._options.num_samples
    return [
      Completion(
        number=row,
        prompt=prompts[row // samples],
        finish_reason=self.finish_reason(row) or "length",
        routes=self._routes(row, len(prompts[row // samples])),
        **self._columns(row, 0, None),
      )
      for row in range(len(self._searched))
    ]

  def _columns(self, row: int, start: int, end: int | None) -> dict[str, Any]:
    """Returns the columns of `Tokens` of a part of a row, without `routes`."""
    out = self._generated()
    columns = {
      "ids": out.tokens,
      "logps": out.logps,
      "sampling_logps": out.sampling_logps,
      "logits": out.logits,
    }

    # Copies: a view would keep the buffers of all rows alive.
    def new(x):
      return self._cut(x, row)[start:end].copy()

    return {name: new(x) for name, x in columns.items() if x is not None}

  def _routes(self, row: int, tokens: int) -> np.ndarray | None:
    """Returns the experts of a row and its prompt of some tokens, see `Tokens`."""
    out, samples = self._generated(), self._options.num_samples
    if out.routes is None or out.prompt_routes is None:
      return None
    own = self._cut(out.routes, row).copy()
    own[-1:] = 0  # run only where other rows were longer
    return np.concatenate([out.prompt_routes[row // samples, -tokens:], own])

  def increment(self, row: int) -> Increment | None:
    """Returns the new part of a row since the last call; None if there is none."""
    if row in self._over:
      return None
    options, reason = self._options, self.finish_reason(row)
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
    return Increment(
      row=row,
      text=text[characters:],
      finish_reason=reason,
      **self._columns(row, tokens, length),
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
