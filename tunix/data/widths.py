"""Widths: a few row lengths that follow the lengths of the records.

The batches of an optimizer step are padded to the smallest width that holds their
longest record (`buckets.batch_steps`). Records and their order stay as they are; only
columns of padding are left out. Each width compiles one program, so there are at most
`MOST`, and a further one must save padding. Widths are multiples of `scan.UNIT` tokens:
similar data sets share compiled programs, and devices multiply matrices of these sizes
fast.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from tunix.data.rows import SideBySide
from tunix.data.scan import UNIT, Report

MOST = 4
_SAVES = 0.08  # share of the tokens that a further width must save
_MUCH = 1 / 3  # share of padding that is worth a remedy
_CANDIDATES = 256  # lengths that are considered

# Part of a record -> field of a layout that limits it.
_LIMITS = {
  "record": "max_length",
  "prompt": "max_prompt_length",
  "completion": "max_completion_length",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Widths:
  """The widths of a data set.

  Attributes:
    layout: layout whose rows have the largest width.
    lengths: all widths, ascending. () for SideBySide, which has one width for prompts
      and one for completions.
    padding: expected share of padding among the tokens; None for SideBySide.
  """

  layout: Any
  lengths: tuple[int, ...] = ()
  padding: float | None = None

  @property
  def tokens(self) -> int:
    """Tokens of the widest row; a prompt with a completion is one row."""
    return sum(dataclasses.astuple(self.layout))

  def __str__(self) -> str:
    if isinstance(self.layout, SideBySide):
      prompt, completion = dataclasses.astuple(self.layout)
      return f"{prompt:,} tokens for the prompt and {completion:,} for a completion"
    assert self.padding is not None
    lengths = [f"{length:,}" for length in self.lengths]
    text = " or ".join(filter(None, (", ".join(lengths[:-1]), lengths[-1])))
    text += f" tokens, about {self.padding:.0%} of them padding"
    if self.padding > _MUCH:
      text += "; data.packing=true or data.length_buckets makes it less"
    return text


def choose(layout: Any, report: Report, batch_size: int, shards: int = 1) -> Widths:
  """Chooses the widths of the rows of a data set.

  The same arguments always give the same widths.

  Args:
    layout: OneRow or SideBySide with the limits of the settings. They are never
      exceeded, and stay if the scan left records out, which may be longer.
    report: report of a scan with these limits.
    batch_size: records that share a width: those of an optimizer step.
    shards: number of shards that the tokens of a row must divide over.
  """
  bounds = bounded(layout, report, shards)
  if isinstance(bounds, SideBySide):
    return Widths(layout=bounds)
  top, tokens = bounds.max_length, report.tokens / report.kept
  if report.scanned < report.records:
    return Widths(layout=bounds, lengths=(top,), padding=1 - tokens / top)
  unit = math.lcm(UNIT, shards)
  unit *= -(-top // (unit * _CANDIDATES))
  candidates = np.array([*range(unit, top, unit), top])
  counts = np.cumsum(report.lengths["record"])
  below = counts[np.minimum(-(-candidates // UNIT), len(counts)) - 1]
  lengths, expected = _fewest(candidates, _shares(below, batch_size))
  return Widths(layout=bounds, lengths=lengths, padding=1 - tokens / expected)


def _shares(below: np.ndarray, batch_size: int) -> np.ndarray:
  """Returns the probabilities that all records of a batch are so short.

  Args:
    below: for every length, the number of records that are not longer; the last is the
      number of all.
    batch_size: records of a batch, drawn without repetition.
  """
  total = int(below[-1])
  shares = np.ones(len(below))
  # A product, and no power or logarithm: all machines round it in the same way.
  for drawn in range(min(batch_size, total)):
    shares *= np.maximum(below - drawn, 0) / (total - drawn)
  return shares


def _fewest(lengths: np.ndarray, shares: np.ndarray) -> tuple[tuple[int, ...], float]:
  """Chooses at most `MOST` lengths with little expected length of a row.

  Args:
    lengths: ascending candidates, of which the last is always chosen.
    shares: for every candidate, the probability that it holds a batch; the last is 1.

  Returns:
    The chosen lengths, and the expected length of a row.
  """
  # cost[j]: expected length over the batches that lengths[j] holds, if it is the
  # largest of the chosen ones.
  cost = lengths * shares
  chosen, expected = [(int(length),) for length in lengths], float(cost[-1])
  # A step from i to j: batches that lengths[j] holds and lengths[i] does not.
  steps = lengths * (shares - shares[:, None])
  steps[np.tril_indices(len(lengths))] = np.inf  # j must be above i
  best = chosen[-1]
  for _ in range(MOST - 1):
    sums = cost[:, None] + steps
    before = sums.argmin(axis=0)
    cost = sums.min(axis=0)
    chosen = [(*chosen[i], int(length)) for i, length in zip(before, lengths)]
    if not cost[-1] < (1 - _SAVES) * expected:
      break
    best, expected = chosen[-1], float(cost[-1])
  return best, expected


def bounded(layout: Any, report: Report, shards: int = 1) -> Any:
  """Returns the layout with rows that are no wider than the longest record.

  Records that fit the limits fit as before. See `choose` for the arguments.
  """
  if report.scanned < report.records:
    return layout
  counts = report.lengths
  unit = math.lcm(UNIT, shards)
  widths = {
    field: min(getattr(layout, field), -(-len(counts[part]) * UNIT // unit) * unit)
    for part, field in _LIMITS.items()
    if part in counts
  }
  narrow = dataclasses.replace(layout, **widths)
  # The limit of one part need not divide: only the sum of both does.
  return layout if sum(dataclasses.astuple(narrow)) % shards else narrow
