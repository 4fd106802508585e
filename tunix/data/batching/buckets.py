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
) -> grain.IterDataset:
  """Returns batches in the form of `OneRow.stack`, int32 [count, W].

  W is one of `widths` or `max_length`, the same for all batches of a step.

  Args:
    stream: elements {"input_tokens", "input_mask"} of at most `max_length` tokens.
    widths: ascending lengths of rows; `max_length` is always the last.
    batch_size: rows of a batch over all processes.
    batches_per_step: batches of a step.
    max_length: tokens of the longest row.
    pad_id: token id of padding.
    first, count: range of rows of this process.

  Raises:
    ValueError: the widths do not ascend, or are not from 2 to `max_length`.
  """
  checks.number("batches_per_step", batches_per_step, checks.COUNT, whole=True)
  rows.check_lengths("widths", widths, max_length)
  every = [width for width in widths if width < max_length] + [max_length]
  cut_step = _CutStep(_Stack(every, pad_id, first, count), batch_size, batches_per_step)
  steps = stream.batch(
    batch_size * batches_per_step, drop_remainder=False, batch_fn=list
  )
  return FlatMapIterDataset(steps, cut_step)


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
    padded = [
      rows.pad_row(element, max_length=length, pad_id=self._pad_id)
      for element in elements
    ]
    return OneRow(max_length=length).stack(padded, **self._part)


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

  def __init__(self, stack: _Stack, batch_size: int, batches_per_step: int):
    self._stack, self._size = stack, batch_size
    self.max_fan_out = batches_per_step

  def flat_map(self, element: list[Row]) -> list[Row]:
    longest = max(len(row["input_tokens"]) for row in element)
    return [
      self._stack(element[start : start + self._size], longest)
      for start in range(0, len(element), self._size)
    ]
