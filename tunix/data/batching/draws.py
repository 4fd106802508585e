"""The order of records over all epochs, as Grain datasets of record numbers.

The datasets have random access, so a position in the order is one integer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import grain

from tunix.data.reading.mixture import Mixture


def draws(
  records: Sequence[Mapping[str, Any]],
  *,
  shuffle: bool,
  seed: int,
  num_epochs: int | None,
) -> grain.MapDataset:
  """Returns the record numbers of all epochs in the order of training."""
  if isinstance(records, Mixture) and records.weights is not None:
    sizes, weights = records.sizes, records.weights
    return weighted_draws(
      sizes, weights, shuffle=shuffle, seed=seed, num_epochs=num_epochs
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
) -> grain.MapDataset:
  """Returns record numbers of concatenated parts, drawn by weight (see `Mixture`).

  Args:
    sizes: number of records of each part, at least 1.
    weights: weight of each part, above 0.
    shuffle: if True, each part has a new order in every pass through it.
    seed: seed of the shuffles; part i uses seed + i.
    num_epochs: number of passes of sum(sizes) draws each; None never ends.
  """
  parts, start = [], 0
  for number, size in enumerate(sizes):
    part = grain.MapDataset.range(start, start + size).seed((seed + number) % 2**32)
    # Parts repeat without end, because Grain's mixture ends when one part ends.
    parts.append((part.shuffle() if shuffle else part).repeat(None))
    start += size
  mixed = grain.MapDataset.mix(parts, list(weights))
  return mixed if num_epochs is None else mixed[: start * num_epochs]
