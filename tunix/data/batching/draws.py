"""The order of records over all epochs, as Grain datasets of record numbers.

The datasets have random access, so a position in the order is one integer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import grain

from tunix.data.reading.mixture import Mixture

_MANY = 2**40  # more draws than a run makes


def draws(
  records: Sequence[Mapping[str, Any]],
  *,
  shuffle: bool,
  seed: int,
  num_epochs: int | None,
) -> grain.MapDataset:
  """Returns the record numbers of all epochs in the order of training."""
  if isinstance(records, Mixture) and records.weights is not None:
    options = {"shuffle": shuffle, "seed": seed, "num_epochs": num_epochs}
    return weighted_draws(
      records.sizes, records.weights, later=records.later, **options
    )
  order = grain.MapDataset.range(len(records)).seed(seed)
  return (order.shuffle() if shuffle else order).repeat(num_epochs)


def weighted_draws(
  sizes: Sequence[int],
  weights: Sequence[float],
  *,
  shuffle: bool,
  seed: int,
  num_epochs: int | None,
  later: Sequence[tuple[int, Sequence[float]]] = (),
) -> grain.MapDataset:
  """Returns record numbers of concatenated parts, drawn by weight (see `Mixture`).

  Args:
    sizes: number of records of each part, at least 1.
    weights: weight of each part.
    shuffle: if True, each part has a new order in every pass through it.
    seed: seed of the shuffles; part i uses seed + i.
    num_epochs: number of passes of sum(sizes) draws each; None never ends.
    later: (draw, weights) pairs in the order of the draws: from that draw on, these
      weights hold. A part goes on where it was.
  """
  parts, start = [], 0
  for number, size in enumerate(sizes):
    part = grain.MapDataset.range(start, start + size).seed((seed + number) % 2**32)
    # Parts repeat without end, because Grain's mixture ends when one part ends.
    parts.append((part.shuffle() if shuffle else part).repeat(None))
    start += size
  mixed = _in_phases(parts, [(0, weights), *later])
  return mixed if num_epochs is None else mixed[: start * num_epochs]


def _in_phases(
  parts: Sequence[grain.MapDataset], phases: Sequence[tuple[int, Sequence[float]]]
) -> grain.MapDataset:
  """Returns a mixture of endless parts whose weights change at some draws."""
  mixed, done = [], [0] * len(parts)
  ends = [*(begin for begin, _ in phases[1:]), None]
  for (begin, weights), end in zip(phases, ends):
    used = [number for number, weight in enumerate(weights) if weight]
    shares = [weights[number] for number in used]
    # A slice that starts at 0 would only make the program slower.
    rest = [parts[n][done[n] :] if done[n] else parts[n] for n in used]
    phase = grain.MapDataset.mix(rest, shares)
    if end is None:
      # Grain adds up the lengths, and that of an endless part is the largest integer.
      return grain.MapDataset.concatenate([*mixed, phase[:_MANY]]) if mixed else phase
    mixed.append(phase[: end - begin])
    for number, count in zip(used, _counts(shares, end - begin)):
      done[number] += count
  raise AssertionError("there is a last phase")


def _counts(weights: Sequence[float], draws: int) -> list[int]:
  """Returns how many of the first draws of a mixture each part gives."""
  tags = [
    grain.MapDataset.range(n * _MANY, (n + 1) * _MANY) for n in range(len(weights))
  ]
  mixed, counts = grain.MapDataset.mix(tags, list(weights)), dict[int, int]()
  # Parts are drawn in turn, so the last draw of each one is near the end.
  for at in range(draws - 1, -1, -1):
    tag: Any = mixed[at]
    part, index = divmod(tag, _MANY)
    counts.setdefault(part, index + 1)
    if len(counts) == len(weights):
      break
  return [counts.get(number, 0) for number in range(len(weights))]
