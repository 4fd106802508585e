"""Length buckets: batches of rows of similar length, which need less padding.

Records come in the order of training, in windows of 32 batches. Within a window, each
record goes into the shortest bucket that it fits, and each bucket is cut into batches.
Records that do not fill a batch move into the next longer bucket. Therefore all batches
except the last one are full, a record stays within its window, and a batch has one of a
few shapes. Each shape compiles one program.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import grain
from grain.experimental import FlatMapIterDataset

from tunix.data import rows
from tunix.data.rows import OneRow, Row

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
  rows.check_buckets(lengths, max_length)
  every = [length for length in lengths if length < max_length] + [max_length]
  cut = _Cut(every, batch_size, pad_id, first, count)
  windows = stream.batch(batch_size * WINDOW, drop_remainder=False, batch_fn=list)
  return FlatMapIterDataset(windows, cut)


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


class _Cut(grain.experimental.FlatMapTransform):
  """Maps the elements of a window to its batches."""

  max_fan_out = WINDOW

  def __init__(
    self, lengths: list[int], batch_size: int, pad_id: int, first: int, count: int
  ):
    self._lengths, self._size, self._pad_id = lengths, batch_size, pad_id
    self._part: dict[str, Any] = {"first": first, "count": count, "pad_id": pad_id}

  def flat_map(self, element: list[Row]) -> list[Row]:
    tokens = [len(row["input_tokens"]) for row in element]
    return [
      self._stacked([element[i] for i in members], max(tokens[i] for i in members))
      for members in cut(tokens, self._lengths, self._size)
    ]

  def _stacked(self, elements: list[Row], longest: int) -> Row:
    length = self._lengths[bisect.bisect_left(self._lengths, longest)]
    padded = [
      rows.pad_row(element, max_length=length, pad_id=self._pad_id)
      for element in elements
    ]
    return OneRow(max_length=length).stack(padded, **self._part)
