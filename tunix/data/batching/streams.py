"""The records of a stream as a Grain dataset, in the order of training."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import grain
import numpy as np

from tunix.data.reading import stored
from tunix.data.reading.stream import Item, Streamed


def draws(
  records: Streamed, *, shuffle: bool, seed: int, num_epochs: int | None
) -> grain.IterDataset:
  """Returns the items of all epochs in the order of training.

  A shuffle draws a new order of every `records.shuffle_buffer` items that follow each
  other. An iterator's state has no item: a restored iterator reads them again.
  """
  return _Items(records, seed if shuffle else None, num_epochs)


class _Items(grain.IterDataset):
  """The items of a stream."""

  def __init__(self, records: Streamed, seed: int | None, num_epochs: int | None):
    super().__init__()
    self._options = records, seed, num_epochs

  def __iter__(self) -> grain.DatasetIterator:
    return _Iterator(*self._options)

  def __repr__(self) -> str:  # Grain saves this text in the state of a loader
    return f"_Items({self._options!r})"


class _Iterator(grain.DatasetIterator):
  """Iterator over windows of items, which are in random order if there is a seed.

  Its state is the place before the window and a digest of the last item. Restoring
  reads the window again, so a stream that now has another item there is noticed.
  """

  def __init__(self, records: Streamed, seed: int | None, num_epochs: int | None):
    super().__init__()
    self._records, self._seed, self._num_epochs = records, seed, num_epochs
    self._start((0, 0, None), 0)

  def _start(self, place: tuple[int, int, Any], number: int) -> None:
    self._before = self._after = place
    self._number = number  # of the window
    self._window: list[Item] = []
    self._taken = 0
    self._items = self._records.items(place, self._num_epochs)

  def _read(self, number: int) -> None:
    """Reads window `number`, which has no item at the end of the stream."""
    size = 1 if self._seed is None else self._records.shuffle_buffer
    read = list(itertools.islice(self._items, size))
    if not read:
      return
    self._before, self._after = self._after, read[-1][1]
    self._window, self._taken = [item for item, _ in read], 0
    self._number = number
    if self._seed is not None:
      # The legacy generator, whose numbers no version of numpy changes.
      order = np.random.RandomState([self._seed, number]).permutation(len(read))
      self._window = [self._window[index] for index in order]

  def __next__(self) -> Item:
    if self._taken == len(self._window):
      self._read(self._number + bool(self._window))
    if self._taken == len(self._window):
      raise StopIteration
    self._taken += 1
    return self._window[self._taken - 1]

  def get_state(self) -> dict[str, Any]:
    """Returns the place of the iterator, as JSON."""
    return {
      "before": list(self._before),
      "number": self._number,
      "taken": self._taken,
      "digest": _digest(self._window[self._taken - 1]) if self._taken else None,
    }

  def set_state(self, state: dict[str, Any]) -> None:
    """Restores a result of `get_state`.

    Raises:
      ValueError: the stream has another item at the place.
    """
    epoch, part, place = state["before"]
    self._start((epoch, part, place), state["number"])
    if not state["taken"]:
      return
    self._read(self._number)
    self._taken = state["taken"]
    items = self._window[self._taken - 1 :]
    if not items or _digest(items[0]) != state["digest"]:
      here = f"another record ({items[0].where})" if items else "no record"
      raise ValueError(
        f"the stream {self._records.name} has {here} at the place of the checkpoint; "
        "expected the record that was read before. Resume with the same data, in the "
        "same order: shuffle with shuffle_buffer, not in the source"
      )


def _digest(item: Item) -> str:
  return hashlib.sha256(stored.as_text(item.record).encode()).hexdigest()[:16]
