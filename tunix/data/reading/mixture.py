"""Several sets of records as one, mixed in given proportions."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import pathlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tunix.data.reading.stored import HeldRecords, Records
from tunix.data.records import Record
from tunix.utils import checks


class Mixture(Records):
  """Several sets of records, the parts, concatenated.

  Without weights, a pass visits every record of every part once. With weights, the
  number of draws in a pass is the number of records of all parts together. Part i gets
  the share w_i / sum(w) of these draws, evenly spread. If that is more than the size of
  the part, its records repeat within the pass, in a new order each time. If it is less,
  the next pass continues after the last record that this pass drew. A part with the
  weight 0 is left out: the mixture is the same as without it.

  Weights may change after a number of draws. Each part then goes on where it was.

  Attributes:
    parts, weights: the parts that are drawn from, and their weights.
    later: (draw, weights) pairs: the weights from that draw on.
    unused: names of the parts with the weight 0.
  """

  def __init__(
    self,
    parts: Sequence[Any],
    weights: Sequence[float] | None = None,
    kind: Any = None,
    later: Mapping[int, Sequence[float]] | None = None,
  ):
    """Concatenates the parts.

    Args:
      parts: `Records`, or other sequences of dicts, which need `kind`.
      weights: one number >= 0 per part; only their ratios matter. None visits every
        record once per pass.
      kind: kind of the parts that are not `Records` (see `tunix.data.records`). None
        takes the kind of the first part that is.
      later: number of a draw -> weights from that draw on; needs `weights`.

    Raises:
      ValueError: there are no parts, their kinds differ, or the weights do not fit.
    """
    if not parts:
      raise ValueError("parts is empty; give a mixture at least one part")
    kinds = [part.kind for part in parts if isinstance(part, Records)]
    if kind is None and not kinds:
      raise ValueError("kind is None and no part has one; give tunix.data.records.SFT")
    self.kind = kinds[0] if kind is None else kind
    self.parts = tuple(
      part
      if isinstance(part, Records)
      else HeldRecords(part, self.kind, name=f"part {number}")
      for number, part in enumerate(parts)
    )
    if others := {part.kind.name for part in self.parts} - {self.kind.name}:
      raise ValueError(
        f"parts are of the kinds {sorted({self.kind.name, *others})}; a mixture takes "
        "parts of one kind"
      )
    self.weights, self.unused, self.later = None, (), ()
    if weights is not None:
      checked = {0: check_weights(weights, len(parts))}
      checked |= {at: check_weights(w, len(parts)) for at, w in (later or {}).items()}
      is_used = [any(column) for column in zip(*checked.values())]

      def used(values):
        return tuple(x for x, kept in zip(values, is_used) if kept)

      self.unused = tuple(p.name for p, kept in zip(self.parts, is_used) if not kept)
      self.parts = used(self.parts)
      (_, self.weights), *self.later = [
        (at, used(checked[at])) for at in sorted(checked)
      ]
    self.name = ", ".join(part.name for part in self.parts)
    # _ends[i] is one past the last record number of part i, for bisection.
    self._ends = list(itertools.accumulate(map(len, self.parts)))

  @property
  def sizes(self) -> tuple[int, ...]:
    """Number of records of each part."""
    return tuple(map(len, self.parts))

  @property
  def fingerprint(self) -> str:
    """SHA-256 of the fingerprints of the parts, in order, in hex."""
    prints = " ".join(part.fingerprint for part in self.parts)
    return hashlib.sha256(prints.encode()).hexdigest()

  def __len__(self) -> int:
    return self._ends[-1]

  def count_by_part(self, indices: Iterable[int]) -> tuple[int, ...]:
    """Returns how many of the given record numbers belong to each part."""
    counts = Counter(self._part_number(index) for index in indices)
    return tuple(counts[number] for number in range(len(self.parts)))

  def where(self, index: int) -> str:
    """Returns the place of record `index` within its part."""
    part, position = self._locate(index)
    return part.where(position)

  def folder_of(self, index: int) -> pathlib.Path | None:
    """Returns the folder of record `index` within its part."""
    part, position = self._locate(index)
    return part.folder_of(position)

  def raw(self, index: int) -> Any:
    """Returns record `index` as stored; raises the errors of `Records.raw`."""
    part, position = self._locate(index)
    return part.raw(position)

  def checked(self) -> Iterator[tuple[dict[str, Any], Record]]:
    """Yields (record, its parsed fields) for every record, part after part."""
    return itertools.chain.from_iterable(part.checked() for part in self.parts)

  def _part_number(self, index: int) -> int:
    # bisect_right counts the ends that are at most `index`. Record number _ends[i] is
    # therefore the first record of part i + 1.
    return bisect.bisect_right(self._ends, index)

  def _locate(self, index: int) -> tuple[Records, int]:
    number = self._part_number(index)
    return self.parts[number], index - (self._ends[number - 1] if number else 0)


def check_weights(weights: Sequence[float], count: int) -> tuple[float, ...]:
  """Returns the weights of `count` parts as a tuple.

  Raises:
    TypeError: a weight is no number.
    ValueError: there are not `count` weights, one is negative or not finite, or all of
      them are 0.
  """
  if len(weights) != count:
    raise ValueError(
      f"weights is {list(weights)}; expected {count} numbers, one for each part"
    )
  for number, weight in enumerate(weights):
    checks.number(f"weights[{number}]", weight, checks.NOT_NEGATIVE)
  if not any(weights):
    raise ValueError(
      f"weights is {list(weights)}; expected a number above 0 among them. Give a part "
      "that should be used a weight above 0"
    )
  return tuple(weights)


def describe(records: object) -> list[str]:
  """Returns a line of text for each part of a weighted mixture.

  The line has the share of the part, and how often one pass of the mixture visits each
  record of the part. Other records give an empty list.
  """
  if not isinstance(records, Mixture) or records.weights is None:
    return []
  total, lines = sum(records.weights), []
  for part, weight in zip(records.parts, records.weights):
    share = weight / total
    passes = share * len(records) / len(part)
    lines.append(
      f"{share:.1%} from {part.name} ({records.kind.counted(len(part))}, "
      f"{passes:.2f} times a pass)"
    )
  for draw, weights in records.later:
    shares = ", ".join(
      f"{w / sum(weights):.1%} from {part.name}"
      for part, w in zip(records.parts, weights)
    )
    lines.append(f"from record {draw:,} on: {shares}")
  return [
    *lines,
    *(f"nothing from {name} (its weight is 0)" for name in records.unused),
  ]
