"""Random-access datasets (`grain.MapDataset`) of records, and batches of their columns.

Programs with their own dataset use this module; the command line reads files through
`tunix.data.pipeline`. All functions keep random access, so the position of a run in its
data is one integer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grain

from tunix.data.batching.prompts import as_columns
from tunix.utils import checks, terminal


class Chosen:
  """Selected records of a source, in random access.

  `MapDataset.filter` leaves holes instead, and Grain does not batch over holes.
  """

  def __init__(self, source: Sequence[Any], indices: Sequence[int]):
    self._source, self._indices = source, indices

  def __len__(self) -> int:
    return len(self._indices)

  def __getitem__(self, index: int) -> Any:
    return self._source[self._indices[index]]

  def __repr__(self) -> str:  # Grain saves this text in the state of a loader
    return f"Chosen({len(self)} records)"


def as_map_dataset(source: Any) -> Any:
  """Returns a MapDataset of any object with a length and items.

  Raises:
    TypeError: `source` has no length or no items.
  """
  if isinstance(source, grain.MapDataset):
    return source
  if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
    raise TypeError(
      f"a dataset is {checks.type_of(source)}; expected a grain.MapDataset, or an "
      "object with a length and items (a list, a datasets.Dataset)"
    )
  return grain.MapDataset.source(source)


def kept(dataset: Any, keep: Callable[[Any], bool], why: str) -> Any:
  """Returns the records for which `keep` is True; reads every record once.

  Args:
    dataset: records in random access.
    keep: condition on a record.
    why: end of the error message "none of N records ...".

  Raises:
    ValueError: no record is kept.
  """
  indices = [i for i in range(len(dataset)) if keep(dataset[i])]
  if not indices:
    raise ValueError(f"none of {len(dataset)} records {why}")
  return grain.MapDataset.source(Chosen(dataset, indices))


def batches(
  dataset: Any, batch_size: int, num_batches: int | None, num_epochs: int | None = 1
) -> Any:
  """Returns full batches {column: list}; the remainder is dropped.

  Args:
    dataset: a MapDataset of dicts with equal keys.
    batch_size: records of a batch.
    num_batches: largest number of batches; None for all.
    num_epochs: passes over the records; None never ends.

  Raises:
    ValueError: a count is below 1, or there are fewer records than a batch has.
  """
  counts = {"batch_size": batch_size, "num_batches": num_batches}
  for name, value in {**counts, "num_epochs": num_epochs}.items():
    if value is not None and value < 1:
      raise ValueError(f"{name} is {value}: it must be at least 1")
  if num_epochs != 1:
    dataset = dataset.repeat(num_epochs)
  if len(dataset) < batch_size:
    raise ValueError(
      f"the dataset has {terminal.counted(len(dataset), 'record')} and batch_size is "
      f"{batch_size}; expected at least one full batch. Lower batch_size"
    )
  dataset = dataset.batch(batch_size, drop_remainder=True, batch_fn=as_columns)
  return dataset if num_batches is None else dataset[:num_batches]
