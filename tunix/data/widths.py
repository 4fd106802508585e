"""Widths: a few row lengths that follow the lengths of the records.

The batches of an optimizer step are padded to the smallest width that holds their
longest record (`buckets.batch_steps`). Records and their order stay as they are; only
columns of padding are left out. Each width compiles one program, so there are at most
`MOST`, and a further one must save padding. Widths are multiples of `scan.UNIT` tokens:
similar data sets share compiled programs, and devices multiply matrices of these sizes
fast. The largest width of short records is finer, because many batches have it.

If rows are shared, a batch has fewer rows than records: short records of a batch stand
in one row, and each attends only to itself. The number of rows is the same in all
batches, and a step has the smallest width with which its records fit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tunix.data.batching import buckets
from tunix.data.rows import OneRow, SideBySide
from tunix.data.scan import FINE_MOST, FINE_UNIT, STEP, UNIT, Report

MOST = 4
_SAVES = 0.08  # share of the tokens that a further width must save
# Share of the tokens that sharing must save. Where attention masks examples more slowly
# than padding, a step of shared rows took 1.47 times as long as one of whole rows.
_SHARING = 1 / 3
_MUCH = 1 / 3  # share of padding that is worth a remedy
_CANDIDATES = 256  # lengths that are considered
_DRAWN = 2048  # records that are drawn to see what shared rows need
_SIZE = 128  # records of a batch for this; larger batches need rows in proportion
_ROWS = 8  # numbers of rows that are considered
_LONG = 8192  # tokens of a row at which attention doubles the cost of a token

# Part of a record -> field of a layout that limits it.
_LIMITS = {
  "record": "max_length",
  "prompt": "max_prompt_length",
  "completion": "max_completion_length",
  "teacher prompt": "max_teacher_prompt_length",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Widths:
  """The widths of a data set.

  Attributes:
    layout: layout whose rows have the largest width.
    lengths: all widths, ascending. () for SideBySide without shared rows, which has
      one width for prompts and one for completions.
    padding: expected share of padding among the tokens; None for SideBySide without
      shared rows.
    rows: rows of a batch, which its records share; None: each record has its own. The
      rows of pairs hold their sequences, a prompt with one completion each.
  """

  layout: Any
  lengths: tuple[int, ...] = ()
  padding: float | None = None
  rows: int | None = None

  @property
  def tokens(self) -> int:
    """Tokens of the widest row; a prompt with a completion is one row."""
    return sum(_row_limits(self.layout))

  def __str__(self) -> str:
    if isinstance(self.layout, SideBySide) and self.rows is None:
      prompt, completion = _row_limits(self.layout)
      text = f"{prompt:,} tokens for the prompt and {completion:,} for a completion"
      own = self.layout.max_teacher_prompt_length
      return text if own is None else f"{text}; {own:,} for the prompt of the teacher"
    assert self.padding is not None
    lengths = [f"{length:,}" for length in self.lengths]
    text = " or ".join(filter(None, (", ".join(lengths[:-1]), lengths[-1])))
    if self.rows is not None:
      what = "records" if isinstance(self.layout, OneRow) else "pairs"
      text = f"{self.rows:,} in a batch, shared by short {what}, of {text}"
    text += f" tokens, about {self.padding:.0%} of them padding"
    if self.padding > _MUCH and isinstance(self.layout, OneRow):
      text += "; data.packing=true or data.length_buckets makes it less"
    return text


def choose(layout: Any, report: Report, batch_size: int, shards: int = 1) -> Widths:
  """Chooses the widths of the rows of a data set.

  The same arguments always give the same widths.

  Args:
    layout: OneRow or SideBySide with the limits of the settings. They are never
      exceeded, and stay if the scan left records out, which may be longer.
    report: report of a scan with these limits. The widths of a stream follow the
      records that the scan saw, and its later records fit the limits.
    batch_size: records that share a width: those of an optimizer step.
    shards: number of shards that the tokens of a row must divide over.
  """
  bounds = bounded(layout, report, shards)
  if isinstance(bounds, SideBySide):
    return Widths(layout=bounds)
  top, tokens = bounds.max_length, report.tokens / report.kept
  if not report.is_whole and report.records is not None:
    return Widths(layout=bounds, lengths=(top,), padding=1 - tokens / top)
  unit = math.lcm(UNIT, shards)
  unit *= -(-top // (unit * _CANDIDATES))
  candidates = np.array([*range(unit, top, unit), top])
  counts = np.cumsum(report.lengths["record"])
  below = counts[np.minimum(-(-candidates // STEP), len(counts)) - 1]
  lengths, expected = _fewest(candidates, _shares(below, batch_size))
  return Widths(layout=bounds, lengths=lengths, padding=1 - tokens / expected)


def share(
  layout: OneRow | SideBySide,
  report: Report,
  batch_size: int,
  batches: int = 1,
  shards: int = 1,
  row_unit: int = 1,
  prompt_once: bool = False,
) -> Widths:
  """Chooses the widths and the number of rows that the records of a batch share.

  The same arguments always give the same result. Records share no rows if the scan left
  some out, or if that saves less than a third of the tokens. The sequences of pairs, a
  prompt with one completion each, share rows as records do. Other records with the
  layout SideBySide share none.

  Args:
    layout, report, shards: see `choose`.
    batch_size: records of a batch, which share its rows.
    batches: batches of an optimizer step, which share a width.
    row_unit: number of shards that the rows of a batch must divide over.
    prompt_once: the prompt of a pair in its own row is computed for both completions.
  """
  alone = choose(layout, report, batch_size * batches, shards)
  if isinstance(layout, SideBySide):
    prompt, completion = _row_limits(alone.layout)
    plain = (prompt / 2 if prompt_once else prompt) + completion
    counts, batch_size = report.lengths.get("sequence", ()), 2 * batch_size
    mean = _mean(counts) if counts else 0.0
  else:
    counts, mean = report.lengths["record"], report.tokens / report.kept
    plain = mean / (1 - (alone.padding or 0))
  if not report.is_whole or batch_size <= row_unit or not counts:
    return alone
  unit = math.lcm(UNIT, shards)
  steps = _drawn(counts, min(batch_size, _SIZE), batches)
  best = alone
  least = batch_size * _cost(plain) * (1 - _SHARING)
  for rows in _numbers(batch_size, row_unit):
    few = max(1, rows * min(batch_size, _SIZE) // batch_size)
    widths, counts = np.unique([_need(s, few, unit) for s in steps], return_counts=True)
    lengths, expected = _fewest(widths, np.cumsum(counts) / len(steps))
    if rows * _cost(expected) < least * (1 - _SAVES):
      least = rows * _cost(expected)
      padding = 1 - mean * batch_size / (rows * expected)
      widest = buckets.widest_row(alone.tokens, batch_size, rows)
      lengths = tuple(sorted({*(x for x in lengths if x < widest), widest}))
      best = dataclasses.replace(alone, lengths=lengths, padding=padding, rows=rows)
  return best


def _cost(length: float) -> float:
  """Returns the cost of a row, in tokens of short rows."""
  return length * (1 + length / _LONG)


def _numbers(batch_size: int, row_unit: int) -> Sequence[int]:
  """Returns numbers of rows below `batch_size`, the largest first."""
  steps = -(-batch_size // row_unit)
  return range(row_unit, batch_size, row_unit * -(-steps // _ROWS))[::-1]


def _mean(counts: Sequence[int]) -> float:
  """Returns the mean number of tokens, from the counts of `Report.lengths`."""
  middles = np.arange(len(counts)) * STEP + (STEP + 1) / 2
  return float(np.dot(middles, counts) / np.sum(counts))


def _drawn(
  histogram: Sequence[int], batch_size: int, batches: int
) -> list[list[list[int]]]:
  """Returns the tokens of the records of random steps, by step and batch."""
  counts = np.cumsum(histogram)
  draws = max(8, _DRAWN // (batches * batch_size))
  # The legacy generator, whose numbers no version of numpy changes.
  drawn = np.random.RandomState(0).randint(0, counts[-1], (draws, batches, batch_size))
  return ((np.searchsorted(counts, drawn, side="right") + 1) * STEP).tolist()


def _need(step: Sequence[Sequence[int]], rows: int, unit: int) -> int:
  """Returns the width with which the batches of a step fit into their rows."""
  least = max(max(*batch, -(-sum(batch) // rows)) for batch in step)
  width = -(-least // unit) * unit
  while not all(buckets.first_fit(batch, rows, width) for batch in step):
    width += unit
  return width


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
  if not report.is_whole:
    return layout
  widths = {}
  for part, field in _LIMITS.items():
    if part in report.lengths:
      longest = len(report.lengths[part]) * STEP
      fine = UNIT < longest <= FINE_MOST
      unit = math.lcm(FINE_UNIT if fine else UNIT, shards)
      widths[field] = min(getattr(layout, field), -(-longest // unit) * unit)
  narrow = dataclasses.replace(layout, **widths)
  # The limit of one part need not divide: only the sum of both does.
  rows = [sum(_row_limits(narrow))]
  if (own := getattr(narrow, "max_teacher_prompt_length", None)) is not None:
    rows.append(own + narrow.max_completion_length)
  return layout if any(row % shards for row in rows) else narrow


def _row_limits(layout: Any) -> list[int]:
  """Returns the limits of the parts of a row: a teacher's prompt is in no such row."""
  limits = dataclasses.asdict(layout)
  limits.pop("max_teacher_prompt_length", None)
  return list(limits.values())
