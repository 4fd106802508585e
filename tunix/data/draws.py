"""Which record comes when: shuffled, repeated, mixed, as Grain's datasets of indices.

Random access, so that a place in the order is a number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import grain

from tunix.data.mixture import Mixture


def draws(
  records: Sequence[Mapping[str, Any]],
  *,
  shuffle: bool,
  seed: int,
  num_epochs: int | None,
) -> grain.MapDataset:
  """Indices of records in the order of training, of all passes."""
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
  """Indices into parts that lie behind each other, drawn by weight (see `Mixture`).

  Args:
    sizes: records of each part, at least 1.
    weights: as many.
    shuffle: each part in a new order on every time through it.
    seed: of those orders.
    num_epochs: passes of sum(sizes) draws; None never ends.
  """
  parts, start = [], 0
  for number, size in enumerate(sizes):
    part = grain.MapDataset.range(start, start + size).seed((seed + number) % 2**32)
    # Endless, since Grain's mixture ends with the first part that does.
    parts.append((part.shuffle() if shuffle else part).repeat(None))
    start += size
  mixed = grain.MapDataset.mix(parts, list(weights))
  return mixed if num_epochs is None else mixed[: start * num_epochs]
