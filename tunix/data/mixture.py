"""Several sets of records as one, in the proportions that are asked for."""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from tunix.data.records import Record
from tunix.data.stored import HeldRecords, Records
from tunix.utils import checks


class Mixture(Records):
  """Sets of records behind each other.

  Without weights a pass is over every record of every set, once. With weights a pass
  has as many records as all sets together, and set `i` has the share w_i / sum(w) of
  them, evenly spread: a set whose share is above its size is gone through more than
  once (in a new order each time), another not to its end; the next pass goes on where
  this one stopped.
  """

  def __init__(
    self, parts: Sequence[Any], weights: Sequence[float] | None = None, kind: Any = None
  ):
    """Puts sets together.

    Args:
      parts: `Records`, or other sequences of dicts (then with `kind`, see
        `tunix.data.records`).
      weights: one for each part, positive; their sum does not matter.
      kind: of parts that are no `Records`; None: that of the first part that is one.

    Raises:
      ValueError: no parts, parts of several kinds, or weights that do not fit.
    """
    if not parts:
      raise ValueError("a mixture of no parts: give at least one")
    known = [part.kind for part in parts if isinstance(part, Records)]
    if kind is None and not known:
      raise ValueError("kind is None and no part has one: give tunix.data.records.SFT")
    self.kind = known[0] if kind is None else kind
    self.parts = tuple(
      part
      if isinstance(part, Records)
      else HeldRecords(part, self.kind, name=f"part {number}")
      for number, part in enumerate(parts)
    )
    if others := {part.kind.name for part in self.parts} - {self.kind.name}:
      raise ValueError(
        f"a mixture of the kinds {sorted({self.kind.name, *others})}: give parts of one"
      )
    self.weights = None if weights is None else check_weights(weights, len(parts))
    self.name = ", ".join(part.name for part in self.parts)
    self._ends = list(itertools.accumulate(map(len, self.parts)))

  @property
  def sizes(self) -> tuple[int, ...]:
    """Records of each part."""
    return tuple(map(len, self.parts))

  @property
  def fingerprint(self) -> str:
    """Of the parts', in order."""
    prints = " ".join(part.fingerprint for part in self.parts)
    return hashlib.sha256(prints.encode()).hexdigest()

  def __len__(self) -> int:
    return self._ends[-1]

  def where(self, index: int) -> str:
    """The place of a record in its part."""
    part, at = self._at(index)
    return part.where(at)

  def raw(self, index: int) -> Any:
    """See the base class."""
    part, at = self._at(index)
    return part.raw(at)

  def checked(self) -> Iterator[tuple[dict[str, Any], Record]]:
    """See the base class."""
    return itertools.chain.from_iterable(part.checked() for part in self.parts)

  def _at(self, index: int) -> tuple[Records, int]:
    number = bisect.bisect_right(self._ends, index)
    return self.parts[number], index - (self._ends[number - 1] if number else 0)


def check_weights(weights: Sequence[float], count: int) -> tuple[float, ...]:
  """The weights of `count` parts, as they were.

  Raises:
    TypeError: one is no number.
    ValueError: another number of them, or one that is not positive and finite.
  """
  if len(weights) != count:
    raise ValueError(
      f"weights {list(weights)} are {len(weights)} and there are {count} parts: give "
      "one for each"
    )
  for number, weight in enumerate(weights):
    if weight == 0:
      raise ValueError(
        f"weights[{number}] is 0: it must be above 0; leave a part out that is not to "
        "be seen"
      )
    checks.number(f"weights[{number}]", weight, checks.POSITIVE)
  return tuple(weights)


def describe(records: Any) -> list[str]:
  """Each part's share of a pass, and how often a pass goes through it; nothing of
  records that are not drawn by weight."""
  if not isinstance(records, Mixture) or records.weights is None:
    return []
  mixture, weights = records, records.weights
  lines = []
  for part, weight in zip(mixture.parts, weights):
    share = weight / sum(weights)
    passes = share * len(mixture) / len(part)
    lines.append(
      f"{share:.1%} from {part.name} ({len(part):,} {mixture.kind.noun}, "
      f"{passes:.2f} times a pass)"
    )
  return lines
