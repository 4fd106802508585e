"""Length buckets: batches of rows of similar length, which need less padding.

Records come in the order of training, in windows of 32 batches. Within a window, each
record goes into the shortest bucket that it fits, and each bucket is cut into batches.
Records that do not fill a batch move into the next longer bucket. Therefore all batches
except the last one are full, a record stays within its window, and a batch has one of a
few shapes. Each shape compiles one program.

`batch_steps` keeps all records in their order, and pads each step by its longest one.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import grain
from grain.experimental import FlatMapIterDataset

from tunix.data import rows
from tunix.data.rows import OneRow, Row
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
  checks.number("batches_per_step", batches_per_step, checks.COUNT, whole=True)
  number = batch_size if shared_rows is None else shared_rows
  widest = widest_row(max_length, batch_size, number)
  rows.check_lengths("widths", widths, widest)
  every = [width for width in widths if width < widest] + [widest]
  stack = _Stack(every, pad_id, first, count)
  cut_step = _CutStep(stack, batch_size, batches_per_step, number)
  steps = stream.batch(
    batch_size * batches_per_step, drop_remainder=False, batch_fn=list
  )
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
    self, stack: _Stack, batch_size: int, batches_per_step: int, number: int
  ):
    self._stack, self._size, self._number = stack, batch_size, number
    self.max_fan_out = batches_per_step

  def flat_map(self, element: list[Row]) -> list[Row]:
    starts = range(0, len(element), self._size)
    batches = [element[start : start + self._size] for start in starts]
    tokens = [[len(row["input_tokens"]) for row in batch] for batch in batches]
    longest = max(map(max, tokens))
    for length in self._stack.lengths[
      bisect.bisect_left(self._stack.lengths, longest) :
    ]:
      groups = [self._groups(counts, length) for counts in tokens]
      if all(group is not None for group in groups):
        return [
          self._stack.joined([[batch[i] for i in row] for row in group or ()], length)
          for batch, group in zip(batches, groups)
        ]
    raise AssertionError("the widest row holds any records")

  def _groups(self, tokens: Sequence[int], length: int) -> list[list[int]] | None:
    if self._number == self._size:  # a record keeps its row
      return [[index] for index in range(len(tokens))]
    return first_fit(tokens, self._number, length)
