"""Random-access datasets (`grain.MapDataset`) of records, cut into batches of columns.

For programs that bring their own dataset; runs of the command read files, see
pipeline.py. Everything here keeps random access, so that a run's place is a number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grain


class Chosen:
  """Some records of a source, by their indices: what filtering with random access is
  (a filtered MapDataset has holes, and Grain does not batch over them)."""

  def __init__(self, source: Any, indices: Sequence[int]):
    self._source, self._indices = source, indices

  def __len__(self) -> int:
    return len(self._indices)

  def __getitem__(self, index: int) -> Any:
    return self._source[self._indices[index]]

  def __repr__(self) -> str:  # Grain writes it into the state of a loader
    return f"Chosen({len(self)} records)"


def as_map_dataset(source: Any) -> Any:
  """A MapDataset of anything with a length and items.

  Raises:
    TypeError: it has none.
  """
  if isinstance(source, grain.MapDataset):
    return source
  if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
    raise TypeError(
      f"a dataset is a {type(source).__name__}: give a grain.MapDataset, or anything "
      "with a length and items (a list, a datasets.Dataset)"
    )
  return grain.MapDataset.source(source)


def kept(dataset: Any, keep: Callable[[Any], bool], why: str) -> Any:
  """The records for which `keep` holds; looks at all of them, once.

  Raises:
    ValueError: there are none; `why` says what was asked of them.
  """
  indices = [i for i in range(len(dataset)) if keep(dataset[i])]
  if not indices:
    raise ValueError(f"none of {len(dataset)} records {why}")
  return grain.MapDataset.source(Chosen(dataset, indices))


def batches(
  dataset: Any, batch_size: int, num_batches: int | None, num_epochs: int | None = 1
) -> Any:
  """Whole batches {column: list}; the remainder is dropped.

  Args:
    dataset: a MapDataset of dicts with equal keys.
    batch_size: records of a batch.
    num_batches: at most so many; None: all.
    num_epochs: passes; None: without end.

  Raises:
    ValueError: a count below 1, or fewer records than a batch.
  """
  counts = {"batch_size": batch_size, "num_batches": num_batches}
  for name, value in {**counts, "num_epochs": num_epochs}.items():
    if value is not None and value < 1:
      raise ValueError(f"{name} is {value}: it must be at least 1")
  if num_epochs != 1:
    dataset = dataset.repeat(num_epochs)
  if len(dataset) < batch_size:
    raise ValueError(
      f"there are {len(dataset)} records and batch_size is {batch_size}: not one whole "
      "batch; make it smaller"
    )
  dataset = dataset.batch(batch_size, drop_remainder=True, batch_fn=_columns)
  return dataset if num_batches is None else dataset[:num_batches]


def _columns(records: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
  return {name: [record[name] for record in records] for name in records[0]}
