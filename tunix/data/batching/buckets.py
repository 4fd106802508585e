"""Length buckets: batches of rows of similar length, which need less padding.

Records come in the order of training, in windows of 32 batches. Within a window, each
record goes into the shortest bucket that it fits, and each bucket is cut into batches.
Records that do not fill a batch move into the next longer bucket. Therefore all batches
except the last one are full, a record stays within its window, and a batch has one of a
few shapes. Each shape compiles one program.

`batch_steps` keeps all records in their order, and pads each step by its longest one.
`batch_pairs` does the same with the prompts and completions of pairs.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np
from grain.experimental import FlatMapIterDataset

from tunix.data import rows
from tunix.data.chat import Rendered
from tunix.data.rows import OneRow, Row, SideBySide
from tunix.utils import checks

# Batches in a window. More batches move fewer rows into longer buckets, but a window is
# held in memory.
WINDOW = 32


def batch(
  stream: grain.IterDataset,
  lengths: Sequence[int],
  batch_size: int,
  *,
  max_length: int,
  pad_id: int,
  first: int,
  count: int,
) -> grain.IterDataset:
  """Returns batches in the form of `OneRow.stack`, int32 [count, L].

  L is one of `lengths`. The state of an iterator does not contain its window; a
  restored iterator reads the window again.

  Args:
    stream: elements {"input_tokens", "input_mask"} of at most `max_length` tokens.
    lengths: ascending lengths of rows; `max_length` is always the last.
    batch_size: rows of a batch over all processes.
    max_length: tokens of the longest row.
    pad_id: token id of padding.
    first, count: range of rows of this process.

  Raises:
    ValueError: the lengths do not ascend, or are not from 2 to `max_length`.
  """
  rows.check_lengths("length_buckets", lengths, max_length)
  every = [length for length in lengths if length < max_length] + [max_length]
  cut = _Cut(_Stack(every, pad_id, first, count), batch_size)
  windows = stream.batch(batch_size * WINDOW, drop_remainder=False, batch_fn=list)
  return FlatMapIterDataset(windows, cut)


def batch_steps(
  stream: grain.IterDataset,
  widths: Sequence[int],
  batch_size: int,
  batches_per_step: int,
  *,
  max_length: int,
  pad_id: int,
  first: int,
  count: int,
  shared_rows: int | None = None,
) -> grain.IterDataset:
  """Returns batches in the form of `OneRow.stack`, int32 [count, W].

  W is one of `widths` or the widest row, the same for all batches of a step. The widest
  row is `max_length`, and with shared rows the one with which any records fit.

  Args:
    stream: elements {"input_tokens", "input_mask"} of at most `max_length` tokens.
    widths: ascending lengths of rows, at most the widest.
    batch_size: records of a batch over all processes.
    batches_per_step: batches of a step.
    max_length: tokens of the longest record.
    pad_id: token id of padding.
    first, count: range of rows of this process.
    shared_rows: rows of a batch over all processes; None: one for each record.

  Raises:
    ValueError: the widths do not ascend, or are not from 2 to the widest row.
  """
  widest = widest_row(max_length, batch_size, shared_rows or batch_size)
  stack = _Stack(_all_widths(widths, widest), pad_id, first, count)
  return _by_step(stream, _CutStep(stack, batch_size, batches_per_step, shared_rows))


def batch_pairs(
  stream: grain.IterDataset,
  widths: Sequence[int],
  batch_size: int,
  batches_per_step: int,
  *,
  layout: SideBySide,
  pad_id: int,
  first: int,
  count: int,
  shared_rows: int,
  own: slice,
) -> grain.IterDataset:
  """Returns batches of pairs whose sequences share rows, int32 [count, W].

  A sequence is a prompt with one completion. To the arrays of `OneRow.stack` come:

    sequence   int32 [count, W], 2 * pair + (0 for chosen, 1 for rejected) of each
               token. Pairs are numbered over all processes.
    tokens     int32 [pairs of this process, 2], scored tokens of each sequence
    weights    float32 [pairs of this process], 0 for a pair that is padding

  Args:
    stream: elements `Rendered` with two completions.
    widths, batches_per_step, pad_id, first, count: see `batch_steps`.
    batch_size: pairs of a batch over all processes.
    layout: limits of prompts and completions.
    shared_rows: rows of a batch over all processes.
    own: range of pairs of this process.

  Raises:
    ValueError: see `batch_steps`.
  """
  longest = layout.max_prompt_length + layout.max_completion_length
  every = _all_widths(widths, widest_row(longest, 2 * batch_size, shared_rows))
  stack = _Stack(every, pad_id, first, count)
  cut_step = _CutPairs(stack, batch_size, batches_per_step, shared_rows, layout, own)
  return _by_step(stream, cut_step)


def _all_widths(widths: Sequence[int], widest: int) -> list[int]:
  rows.check_lengths("widths", widths, widest)
  return [width for width in widths if width < widest] + [widest]


def _by_step(stream: grain.IterDataset, cut_step: _CutStep) -> grain.IterDataset:
  steps = stream.batch(cut_step.step_size, drop_remainder=False, batch_fn=list)
  return FlatMapIterDataset(steps, cut_step)


def widest_row(max_length: int, batch_size: int, shared_rows: int) -> int:
  """Returns the tokens of a row with which any records fit into shared rows.

  A record that fits no row finds a multiple of `max_length` less its own tokens in each
  of them, so that the rows hold as many records as the batch has.
  """
  return max_length * -(-batch_size // shared_rows)


def first_fit(
  tokens: Sequence[int], number: int, length: int
) -> list[list[int]] | None:
  """Assigns records to rows, the longest first, each to the first row with enough room.

  Args:
    tokens: tokens of the records.
    number: number of rows.
    length: tokens of a row.

  Returns:
    Indices of records, ascending, for each row that has some; None: they do not fit.
  """
  taken, members = [0] * number, [[] for _ in range(number)]
  for index in sorted(range(len(tokens)), key=lambda i: -tokens[i]):
    count = tokens[index]
    row = next((r for r in range(number) if taken[r] + count <= length), None)
    if row is None:
      return None
    taken[row] += count
    members[row].append(index)
  return [sorted(row) for row in members if row]


def cut(lengths: Sequence[int], at: Sequence[int], batch_size: int) -> list[list[int]]:
  """Assigns the elements of a window to batches.

  Args:
    lengths: tokens of the elements, in order.
    at: ascending lengths of the buckets; the last holds every element.
    batch_size: elements of a batch.

  Returns:
    Indices of elements, one list per batch. Batches come in the order of their last
    elements, so that short and long batches alternate as the records do. If the size of
    the window is not a multiple of `batch_size`, the last batch is smaller.
  """
  by_bucket: list[list[int]] = [[] for _ in at]
  for index, length in enumerate(lengths):
    by_bucket[bisect.bisect_left(at, length)].append(index)
  batches, left = [], []
  for members in by_bucket:
    members = sorted(left + members)
    whole = len(members) // batch_size * batch_size
    batches += [members[i : i + batch_size] for i in range(0, whole, batch_size)]
    left = members[whole:]
  return sorted(batches, key=lambda batch: batch[-1]) + ([left] if left else [])


class _Stack:
  """Stacks elements in rows of the shortest length that holds them.

  Args:
    lengths: ascending lengths of rows; the last holds every element.
    pad_id: token id of padding.
    first, count: range of rows of this process.
  """

  def __init__(self, lengths: Sequence[int], pad_id: int, first: int, count: int):
    self.lengths, self._pad_id = lengths, pad_id
    self._part: dict[str, Any] = {"first": first, "count": count, "pad_id": pad_id}

  def __call__(self, elements: Sequence[Row], longest: int) -> Row:
    """Returns a batch whose rows hold `longest` tokens."""
    length = self.lengths[bisect.bisect_left(self.lengths, longest)]
    return self.joined([[element] for element in elements], length)

  def joined(self, groups: Sequence[Sequence[Row]], length: int) -> Row:
    """Returns a batch whose rows hold a group of elements each."""
    options = {"max_length": length, "pad_id": self._pad_id}
    joined = [rows.join_row(group, **options) for group in groups]
    return OneRow(max_length=length).stack(joined, **self._part)

  def owners(self, groups: Sequence[Sequence[int]], segments: np.ndarray) -> np.ndarray:
    """Returns the number of the element that each token of `joined` belongs to.

    Args:
      groups: numbers of the elements of each row of the whole batch.
      segments: segments of the rows of this process. Padding belongs to element 0.
    """
    owners, first = np.zeros_like(segments), self._part["first"]
    for row, group, own in zip(owners, groups[first:], segments):
      row[:] = np.asarray([0, *group])[own]
    return owners


class _Cut(grain.experimental.FlatMapTransform):
  """Maps the elements of a window to its batches."""

  max_fan_out = WINDOW

  def __init__(self, stack: _Stack, batch_size: int):
    self._stack, self._size = stack, batch_size

  def flat_map(self, element: list[Row]) -> list[Row]:
    tokens = [len(row["input_tokens"]) for row in element]
    return [
      self._stack([element[i] for i in members], max(tokens[i] for i in members))
      for members in cut(tokens, self._stack.lengths, self._size)
    ]


class _CutStep(grain.experimental.FlatMapTransform):
  """Maps the elements of a step to its batches, in their order."""

  def __init__(
    self, stack: _Stack, batch_size: int, batches_per_step: int, number: int | None
  ):
    checks.number("batches_per_step", batches_per_step, checks.COUNT, whole=True)
    self._stack, self._size, self._number = stack, batch_size, number
    self.max_fan_out = batches_per_step
    self.step_size = batch_size * batches_per_step

  def flat_map(self, element: list[Any]) -> list[Row]:
    return self._joined(self._batches(element))[0]

  def _batches(self, element: list[Any]) -> list[list[Any]]:
    starts = range(0, len(element), self._size)
    return [element[start : start + self._size] for start in starts]

  def _joined(
    self, batches: list[list[Row]]
  ) -> tuple[list[Row], list[list[list[int]]]]:
    """Returns the batches of rows, and the numbers of the records in each row."""
    tokens = [[len(row["input_tokens"]) for row in batch] for batch in batches]
    longest = max(map(max, tokens))
    for length in self._stack.lengths[
      bisect.bisect_left(self._stack.lengths, longest) :
    ]:
      groups = [self._groups(counts, length) for counts in tokens]
      fitting = [group for group in groups if group is not None]
      if len(fitting) == len(groups):
        return [
          self._stack.joined([[batch[i] for i in row] for row in group], length)
          for batch, group in zip(batches, fitting)
        ], fitting
    raise AssertionError("the widest row holds any records")

  def _groups(self, tokens: Sequence[int], length: int) -> list[list[int]] | None:
    if self._number is None:  # a record keeps its row
      return [[index] for index in range(len(tokens))]
    return first_fit(tokens, self._number, length)


class _CutPairs(_CutStep):
  """Maps the pairs of a step to batches in which their sequences share rows.

  Args:
    stack, batch_size, batches_per_step, number: see `_CutStep`.
    layout: makes the sequences of a pair.
    own: range of pairs of this process.
  """

  def __init__(
    self,
    stack: _Stack,
    batch_size: int,
    batches_per_step: int,
    number: int,
    layout: SideBySide,
    own: slice,
  ):
    super().__init__(stack, batch_size, batches_per_step, number)
    self._layout, self._own = layout, own

  def flat_map(self, element: list[Rendered]) -> list[Row]:
    pairs = self._batches(element)
    sequences = [
      [x for p in batch for x in self._layout.sequences(p)] for batch in pairs
    ]
    out, members = self._joined(sequences)
    for batch, rows_of, own in zip(out, members, pairs):
      batch["sequence"] = self._stack.owners(rows_of, batch["segment_ids"])
      batch |= self._scored(own)
    return out

  def _scored(self, pairs: Sequence[Rendered]) -> Row:
    """Returns the scored tokens and the weights of the pairs of this process."""
    count, own = self._own.stop - self._own.start, pairs[self._own]
    tokens, weights = np.zeros((count, 2), np.int32), np.zeros(count, np.float32)
    weights[: len(own)] = 1.0
    for line, pair in zip(tokens, own):
      # Nothing predicts the first token after an empty prompt: trainers refuse the 0.
      line[:] = [np.sum(mask) * bool(len(pair.prompt)) for mask in pair.masks]
    return {"tokens": tokens, "weights": weights}
