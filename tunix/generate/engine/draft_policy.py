"""Decides whether a launch uses drafts, which it does while they are faster."""

from __future__ import annotations

import math

# Tokens after which an older observation counts a third.
_MEMORY_TOKENS = 256
# Advantage from which drafts are used, because both sides are estimates.
_MARGIN = 1.05
# Time of a round with drafts, in rounds without, until both were measured.
_FIRST_COST = 1.5


class DraftPolicy:
  """Compares the tokens of a round with drafts to its cost.

  Without drafts, the device compares the first draft that it would have proposed with
  the token that was drawn. So it is known how often drafts would be accepted without
  trying them.

  Args:
    draft_tokens: number of drafts of a round that uses them.
    measures: use the measured times of rounds. False: assume a cost, because the
      processes of a run must decide alike.
  """

  def __init__(self, draft_tokens: int, measures: bool):
    self._drafts, self._measures = draft_tokens, measures
    self._gain = 1.0  # tokens of a completion in a round with drafts
    self._seconds: dict[bool, float] = {}
    self._seen: set[tuple[bool, int]] = set()

  def choose(self) -> int:
    """Returns the number of drafts of the next launch."""
    return self._drafts if self._gain > self._cost() * _MARGIN else 0

  def record(self, drafts: int, turns: int, drawn: int, hits: int, seen: int) -> None:
    """Takes what a launch showed.

    Args:
      drafts: number of drafts that it used.
      turns: number of rounds, summed over the completions in them.
      drawn: number of tokens that these rounds drew.
      hits: without drafts: number of tokens that a first draft predicted.
      seen: without drafts: number of tokens that were compared with one.
    """
    if not self._drafts or not (turns if drafts else seen):
      return
    if drafts:
      gain = drawn / turns
    else:  # a draft counts if all before it are right
      share = hits / seen
      gain = sum(share**i for i in range(self._drafts + 1))
    weight = 1 - math.exp(-drawn / _MEMORY_TOKENS)
    self._gain += weight * (gain - self._gain)

  def record_time(self, drafts: int, width: int, seconds: float) -> None:
    """Takes the time of a round.

    Args:
      drafts: number of drafts that it used.
      width: tokens of a row; the first time of each program includes its compilation.
      seconds: time of one round.
    """
    key = bool(drafts), width
    if not self._measures or key not in self._seen:
      self._seen.add(key)
      return
    known = self._seconds.get(key[0], seconds)
    self._seconds[key[0]] = 0.7 * known + 0.3 * seconds

  def _cost(self) -> float:
    if len(self._seconds) < 2:
      return _FIRST_COST
    return self._seconds[True] / self._seconds[False]
