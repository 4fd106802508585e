"""Prompts of an RL run: batches, and the source that draws them.

Rollouts are sampled when a step needs them, by the newest policy. `PromptSource` only
draws prompts; it does not sample ahead of the learner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tunix.data.records import (
  IMAGE_TOKENS_COLUMN,
  PROMPT_IDS_COLUMN,
  RAW_PROMPT_COLUMN,
)
from tunix.rl.prompts.curriculum import Curriculum
from tunix.sft.steps.batch_source import BatchSource

PROMPTS = "prompts"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptBatch:
  """A batch of prompts with the columns that reward functions receive.

  Attributes:
    prompts: P prompts: strings, message lists or lists of token ids.
    columns: P values for each column name. The column "prompt_token_ids" has the ids to
      sample from, where the text of a prompt is only for reward functions. Prompts with
      images have "images" and "prompt_image_tokens", see `tunix.data.records`.
    number: number of batches that were drawn before this one.
  """

  prompts: list[Any]
  columns: dict[str, list[Any]]
  number: int

  @property
  def inputs(self) -> list[Any]:
    """The prompts as the rollout engine receives them."""
    return self.columns.get(PROMPT_IDS_COLUMN, self.prompts)

  @property
  def extra(self) -> dict[str, list[Any]]:
    """The columns that reward functions receive."""
    ours = (PROMPT_IDS_COLUMN, RAW_PROMPT_COLUMN, IMAGE_TOKENS_COLUMN)
    return {n: x for n, x in self.columns.items() if n not in ours}

  def rows(self) -> list[dict[str, Any]]:
    """Returns one dict for each prompt."""
    names = [PROMPTS, *self.columns]
    return [dict(zip(names, row)) for row in zip(self.prompts, *self.columns.values())]

  def take(self, indices: Iterable[int]) -> PromptBatch:
    """Returns the prompts at the given indices, which may repeat."""
    index = list(indices)
    return dataclasses.replace(
      self,
      prompts=[self.prompts[i] for i in index],
      columns={name: [x[i] for i in index] for name, x in self.columns.items()},
    )

  def joined(self, others: Iterable[PromptBatch]) -> PromptBatch:
    """Appends the prompts of other batches.

    Raises:
      ValueError: a batch has other columns.
    """
    batches = [self, *others]
    for batch in batches:
      if batch.columns.keys() != self.columns.keys():
        raise ValueError(
          f"columns are {sorted(self.columns)} in one batch and "
          f"{sorted(batch.columns)} in another: give all batches the same columns"
        )
    return dataclasses.replace(
      self,
      prompts=[prompt for batch in batches for prompt in batch.prompts],
      columns={
        name: [value for batch in batches for value in batch.columns[name]]
        for name in self.columns
      },
    )


def prompt_batch(batch: Mapping[str, Any], number: int = 0) -> PromptBatch:
  """Reads a batch of the user's data.

  Raises:
    TypeError: the batch is not a mapping with the key "prompts".
    ValueError: there are no prompts, or a column has another length.
  """
  if not isinstance(batch, Mapping) or PROMPTS not in batch:
    form = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
    raise TypeError(
      f'a batch is {form}: expected a dict {{"prompts": [...], column: [...]}}'
    )
  if isinstance(batch[PROMPTS], str):
    raise TypeError('"prompts" is one string: expected a list of prompts')
  columns = {
    name: values.tolist() if isinstance(values, np.ndarray) else list(values)
    for name, values in batch.items()
  }
  prompts = columns.pop(PROMPTS)
  if not prompts:
    raise ValueError('a batch has no "prompts": give at least one')
  for name, values in columns.items():
    if len(values) != len(prompts):
      raise ValueError(
        f"the column {name!r} has {len(values)} values for {len(prompts)} prompts: "
        "give one value for each prompt"
      )
  return PromptBatch(prompts=prompts, columns=columns, number=number)


def _batch_of(rows: list[dict[str, Any]], number: int) -> PromptBatch:
  return prompt_batch({k: [row[k] for row in rows] for k in rows[0]}, number)


class PromptSource:
  """Draws batches of prompts, and can save and restore its position in the data.

  Args:
    dataset: an iterable of batches.
    place: position that `state` returned; None at the start of a run.
    pending: prompts that were drawn before but not trained, one dict per prompt. `take`
      returns them first.
    curriculum: chooses among the prompts of the data; None: all of them.
    size: prompts of the largest batch of the data so far. With a curriculum, every
      batch is filled up to it.

  Attributes:
    skipped: number of prompts that the curriculum has skipped since the last `commit`.
  """

  def __init__(
    self,
    dataset: Iterable[Any],
    place: dict[str, Any] | None = None,
    pending: Iterable[dict[str, Any]] = (),
    curriculum: Curriculum | None = None,
    size: int = 0,
  ):
    self._source = BatchSource(dataset, saved=place)
    self.pending = list(pending)
    self._curriculum, self.size, self.skipped = curriculum, size, 0
    self._next: PromptBatch | None = None  # drawn by `has_more`, not taken yet
    self._ended = False
    # (batches drawn, pending prompts) at the last `commit`, for `go_back`.
    self._committed = self._source.drawn, list(self.pending)

  @property
  def drawn(self) -> int:
    """Number of batches drawn since the run began."""
    return self._source.drawn

  def has_more(self) -> bool:
    """Returns True if `take` has another batch."""
    # The batch that is drawn here is not committed. A checkpoint that is saved before
    # `take` does not count it, and a resumed run draws it again.
    if self._next is None and not self._ended:
      self._next = self._draw()
    return self._next is not None

  def take(self) -> PromptBatch | None:
    """Returns the next batch, pending prompts first; None at the end."""
    batch = self._next if self.has_more() else None
    self._next = None
    return batch

  def end(self) -> None:
    """Ends the source: `take` returns None until `go_back` is called."""
    self._ended = True

  def _draw(self) -> PromptBatch | None:
    if self._curriculum is not None:
      return self._draw_chosen(self._curriculum)
    # Pending prompts were counted when they were drawn, so they do not advance `drawn`.
    if self.pending:
      rows, self.pending = self.pending, []
      return _batch_of(rows, self.drawn)
    batch = self._source.next()
    return None if batch is None else prompt_batch(batch, self.drawn)

  def _draw_chosen(self, curriculum: Curriculum) -> PromptBatch | None:
    """Fills a batch with prompts that the curriculum chooses."""
    rows, others, ended = list(self.pending), [], False
    for _ in range(curriculum.config.most_batches):
      if 0 < self.size <= len(rows):
        break
      number = self.drawn
      if ended := (batch := self._source.next()) is None:
        break
      drawn = prompt_batch(batch, number).rows()
      self.size = max(self.size, len(drawn))
      chances = curriculum.chances(drawn)
      is_chosen = curriculum.chosen(chances, number)
      rows += [row for row, chosen in zip(drawn, is_chosen) if chosen]
      others += [x for x in zip(chances, drawn, is_chosen) if not x[2]]
    self.skipped += len(others)
    if not ended and (missing := self.size - len(rows)) > 0:
      # The sort is stable: among equal chances, the order of the data stays.
      others.sort(key=lambda other: -other[0])
      rows += [row for _, row, _ in others[:missing]]
      self.skipped -= missing
    # New lists, because a checkpoint may still refer to the last one.
    self.pending = rows[self.size :]
    return _batch_of(rows[: self.size], self.drawn) if rows else None

  def continues(self, dataset: object) -> bool:
    """Returns True if `dataset` is the same generator that this source draws from."""
    return self._source.continues(dataset)

  def go_back(self) -> None:
    """Returns to the position of the last `commit`."""
    place, self.pending = self._committed
    self._next, self._ended, self.skipped = None, False, 0
    self._source.go_back(place)

  def give_back(self, batch: PromptBatch) -> None:
    """Puts prompts back, so that the next `take` returns them."""
    self.pending = [*batch.rows(), *self.pending]

  def commit(self) -> dict[str, Any]:
    """Marks the batches drawn so far as trained.

    Returns:
      {"drawn": number of these batches}, for `state`.
    """
    self._source.mark()
    # A copy, because `take` empties and `give_back` extends the list.
    self._committed, self.skipped = (self._source.drawn, list(self.pending)), 0
    return {"drawn": self._source.drawn}

  def remember(self) -> None:
    """Keeps the present position for a later `state`; see `BatchSource.remember`."""
    self._source.remember()

  def state(self, drawn: int) -> dict[str, Any]:
    """Returns the position after `drawn` batches; see `BatchSource.state`."""
    return self._source.state(drawn)
