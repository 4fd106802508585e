"""WHEN things happen: prompts in, mini-batches out.

A producer that samples ahead of the learner would stand between `PromptSource` and
`mini_batches`; here rollouts are made when they are needed, by the newest policy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from tunix.rl.common import TrainExample
from tunix.sft.batch_source import BatchSource

PROMPTS = "prompts"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptBatch:
  """Prompts with the columns that reward functions see.

  Attributes:
    prompts: P strings, message lists or id lists.
    columns: P values each.
    number: batches drawn before it.
  """

  prompts: list[Any]
  columns: dict[str, list[Any]]
  number: int

  def rows(self) -> list[dict[str, Any]]:
    """The batch prompt by prompt."""
    names = [PROMPTS, *self.columns]
    return [dict(zip(names, row)) for row in zip(self.prompts, *self.columns.values())]

  def take(self, keep: Iterable[int]) -> PromptBatch:
    """Some of the prompts."""
    index = list(keep)
    return dataclasses.replace(
      self,
      prompts=[self.prompts[i] for i in index],
      columns={name: [x[i] for i in index] for name, x in self.columns.items()},
    )

  def joined(self, others: Iterable[PromptBatch]) -> PromptBatch:
    """With the prompts of other batches behind its own.

    Raises:
      ValueError: they have other columns.
    """
    every = [self, *others]
    if wrong := [b for b in every if b.columns.keys() != self.columns.keys()]:
      raise ValueError(
        f"batches with the columns {sorted(self.columns)} and "
        f"{sorted(wrong[0].columns)} are put together: give all of them the same ones"
      )
    return dataclasses.replace(
      self,
      prompts=[prompt for batch in every for prompt in batch.prompts],
      columns={
        name: [value for batch in every for value in batch.columns[name]]
        for name in self.columns
      },
    )


def prompt_batch(batch: Mapping[str, Any], number: int = 0) -> PromptBatch:
  """A batch of the user's data.

  Raises:
    TypeError: no mapping with "prompts".
    ValueError: columns of another length than the prompts.
  """
  if not isinstance(batch, Mapping) or PROMPTS not in batch:
    form = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
    raise TypeError(
      f'a batch is {form}: expected a dict {{"prompts": [...], column: [...]}}'
    )
  if isinstance(batch[PROMPTS], str):
    raise TypeError('"prompts" is one string: give a batch, a list of prompts')
  columns = {name: _listed(values) for name, values in batch.items()}
  prompts = columns.pop(PROMPTS)
  if not prompts:
    raise ValueError('a batch has no "prompts": give at least one')
  for name, values in columns.items():
    if len(values) != len(prompts):
      raise ValueError(
        f"the column {name!r} has {len(values)} values for {len(prompts)} prompts"
      )
  return PromptBatch(prompts=prompts, columns=columns, number=number)


def _listed(values: Any) -> list[Any]:
  """Python values, also of numpy arrays."""
  return values.tolist() if isinstance(values, np.ndarray) else list(values)


class PromptSource:
  """Draws batches of prompts, from a place that can be saved.

  Args:
    dataset: yields batches.
    place: what `state` gave; None at the start.
    pending: prompts, row by row, that were drawn and go first.
  """

  def __init__(
    self,
    dataset: Iterable[Any],
    place: dict[str, Any] | None = None,
    pending: Iterable[dict[str, Any]] = (),
  ):
    self._source = BatchSource(dataset, saved=place)
    self.pending = list(pending)
    self._next: PromptBatch | None = None  # drawn, and not taken yet
    self._ended = False
    self._committed = self._source.drawn, list(self.pending)

  @property
  def drawn(self) -> int:
    """Batches drawn since the run began."""
    return self._source.drawn

  def has_more(self) -> bool:
    """Whether `take` gives a batch."""
    if self._next is None and not self._ended:
      self._next = self._draw()
    return self._next is not None

  def take(self) -> PromptBatch | None:
    """The next batch, of the prompts that wait if there are any; None at the end."""
    batch = self._next if self.has_more() else None
    self._next = None
    return batch

  def end(self) -> None:
    """Nothing more is taken of this source."""
    self._ended = True

  def _draw(self) -> PromptBatch | None:
    if self.pending:
      rows, self.pending = self.pending, []
      names = rows[0]
      return prompt_batch({k: [row[k] for row in rows] for k in names}, self.drawn)
    batch = self._source.next()
    return None if batch is None else prompt_batch(batch, self.drawn)

  def continues(self, dataset: Any) -> bool:
    """Whether `dataset` is the very generator that this source draws from."""
    return self._source.continues(dataset)

  def go_back(self) -> None:
    """Gives what was drawn since `commit` once more."""
    place, self.pending = self._committed
    self._next, self._ended = None, False
    self._source.go_back(place)

  def give_back(self, batch: PromptBatch) -> None:
    """Prompts that go first the next time.

    Raises:
      TypeError: a column that cannot be saved as JSON.
    """
    self.pending = [*batch.rows(), *self.pending]

  def commit(self) -> dict[str, Any]:
    """What was drawn is learnt; returns how much that is, for `state` to find."""
    self._source.mark()
    self._committed = self._source.drawn, list(self.pending)
    return {"drawn": self._source.drawn}

  def remember(self) -> None:
    """As BatchSource."""
    self._source.remember()

  def state(self, drawn: int) -> dict[str, Any]:
    """As BatchSource."""
    return self._source.state(drawn)


def mini_batches(
  example: TrainExample,
  *,
  group: int,
  rows: int,
  iterations: int,
  shuffle: tuple[int, ...] | None,
) -> Iterator[TrainExample]:
  """Cuts rollouts into mini-batches of equal size, over and over.

  The last one of an iteration is filled up with rows that weigh nothing, so that
  nothing recompiles and no rollout is dropped; one that would weigh nothing at all is
  left out (its update would still move an optimizer with momentum).

  Args:
    example: the rollouts, group by group.
    group: rows of a group; groups stay together.
    rows: of a mini-batch, a multiple of `group`.
    iterations: how often all of them are given.
    shuffle: seed of the order of groups, anew in each iteration; None: as they are.
  """
  for iteration in range(iterations):
    order = np.arange(example.rows // group)
    if shuffle is not None:
      order = np.random.default_rng((*shuffle, iteration)).permutation(order)
    index = (order[:, None] * group + np.arange(group)).ravel()
    for start in range(0, len(index), rows):
      mini = example.take(index[start : start + rows]).padded_to(rows)
      if mini.completion_mask.any():
        yield mini
