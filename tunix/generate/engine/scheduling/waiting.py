"""The queue: completions that wait for a slot and for pages."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from tunix.generate.engine.scheduling.sequence import Sequence


class Waiting:
  """Completions without a slot.

  Attributes:
    is_held: if True, only completions that have started leave the queue.
  """

  def __init__(self):
    self.is_held = False
    self._ready: list[tuple[tuple[int, int], Sequence]] = []  # a heap, by rank
    self._held: list[Sequence] = []

  def __len__(self) -> int:
    return len(self._ready) + len(self._held)

  def __iter__(self) -> Iterator[Sequence]:
    """Yields the completions, in no order."""
    yield from self._held
    yield from (s for _, s in self._ready)

  @property
  def first(self) -> Sequence | None:
    """The completion that leaves next, or None."""
    return self._ready[0][1] if self._ready else None

  def add(self, sequence: Sequence) -> None:
    """Adds a completion."""
    if self.is_held and not sequence.is_started:
      self._held.append(sequence)
    else:
      heapq.heappush(self._ready, (sequence.rank, sequence))

  def pop(self) -> Sequence:
    """Removes and returns the first completion."""
    return heapq.heappop(self._ready)[1]

  def remove(self, sequence: Sequence) -> None:
    """Removes a completion, if it is there."""
    self._fill([s for s in self if s is not sequence])

  def hold_back(self, is_held: bool) -> None:
    """Holds completions back that have not started, or lets them start."""
    self.is_held = is_held
    self._fill(list(self))

  def _fill(self, sequences: list[Sequence]) -> None:
    self._ready, self._held = [], []
    for sequence in sequences:
      self.add(sequence)
