"""Prompts with columns for reinforcement learning: their layout and their batches.

Prompts stay text, because the rollout engine tokenizes them together with the
completions. Batches are dicts of lists: "prompts" and one list for each column.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tunix.data.chat import Rendered
from tunix.data.records import IMAGE_TOKENS_COLUMN, IMAGES_COLUMN, PROMPT_COLUMN
from tunix.data.rows import IMAGE_TOKENS, Overlong
from tunix.utils import checks

Row = dict[str, Any]
PROMPTS = PROMPT_COLUMN


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptText:
  """Layout of prompts that stay text, see `tunix.data.rows` for its methods.

  A prompt is never cut, because the cut prompt would be another question. "truncate"
  therefore drops a prompt that is too long, as "drop" does.

  Attributes:
    max_prompt_length: tokens of a prompt, including BOS; None for no limit.
  """

  max_prompt_length: int | None = None

  def __post_init__(self):
    checks.fields(self, max_prompt_length=checks.COUNT)

  def why_dropped(self, names: Sequence[str]) -> str:
    """Returns why all records were dropped, and the remedy."""
    del names
    return (
      f"longer than max_prompt_length {self.max_prompt_length}, so none is left; raise "
      "the length"
    )

  def fit(
    self, rendered: Rendered, overlong: Overlong, bos_id: int | None
  ) -> Rendered | None:
    """Returns the record, or None if its prompt is too long.

    Raises:
      ValueError: the prompt is too long and `overlong` is "error".
    """
    del bos_id
    length, limit = len(rendered.prompt), self.max_prompt_length
    if limit is None or length <= limit:
      return rendered
    if overlong != "error":
      return None
    raise ValueError(
      f"the prompt has {length} tokens and max_prompt_length is {limit}; raise it, or "
      'set overlong to "drop"'
    )

  def lengths(self, rendered: Rendered) -> dict[str, int]:
    """Returns the number of tokens of the prompt, and of its images if it has any."""
    lengths = {"prompt": len(rendered.prompt)}
    if rendered.pictures:
      lengths[IMAGE_TOKENS] = sum(image.num_tokens for image in rendered.pictures)
    return lengths

  def tokens(self, rendered: Rendered) -> int:
    """Returns 0: reports count tokens of completions."""
    del rendered
    return 0

  def element(self, rendered: Rendered) -> Row:
    """Returns {"prompts": text, column: value}."""
    return dict(rendered.extra)

  def stack(
    self,
    elements: Sequence[Row],
    names: Sequence[str] = (),
    *,
    first: int = 0,
    count: int | None = None,
    pad_id: int = 0,
  ) -> dict[str, list[Any]]:
    """Returns a list for each column of rows `first` to `first + count`."""
    del names, pad_id
    return as_columns(elements[first : None if count is None else first + count])


def with_equal_room(rows: Sequence[Row]) -> list[Row]:
  """Returns prompts that all have room for the most image tokens of one of them.

  If no prompt has an image, the columns of images are left out.
  """
  most = max((row.get(IMAGE_TOKENS_COLUMN, 0) for row in rows), default=0)
  if most:
    return [{**row, IMAGE_TOKENS_COLUMN: most} for row in rows]
  columns = (IMAGES_COLUMN, IMAGE_TOKENS_COLUMN)
  has_columns = any(IMAGE_TOKENS_COLUMN in row for row in rows)
  return [
    {k: v for k, v in row.items() if not (has_columns and k in columns)} for row in rows
  ]


def as_columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
  """Converts rows with equal columns to {column: list of its values}."""
  return {name: [row[name] for row in rows] for name in rows[0]}


class PromptBatches:
  """Batches {"prompts": [...], column: [...]} in an order determined by the seed.

  Iterators have `get_state()` and `set_state()`. The state is the number of batches
  drawn, from which epoch and order follow. The last batch of an epoch may be smaller.

  Args:
    rows: prompts with their columns.
    size: prompts of a batch.
    seed: seed of a new order in every epoch; None keeps the order of `rows`.
    epochs: number of passes; None never ends.
    sizes: number of rows of each part of a weighted mixture.
    weights: weight of each part, see `tunix.data.reading.mixture.Mixture`; None
      visits every row once per pass.
    later: (draw, weights) pairs: the weights from that draw on.

  Raises:
    ValueError: a part with a weight has no row.
  """

  def __init__(
    self,
    rows: Sequence[Row],
    size: int,
    *,
    seed: int | None,
    epochs: int | None,
    sizes: Sequence[int] = (),
    weights: Sequence[float] | None = None,
    later: Sequence[tuple[int, Sequence[float]]] = (),
  ):
    self.rows, self.size, self.seed, self.epochs = rows, size, seed, epochs
    self.sizes = tuple(sizes)
    self._draws = None
    if weights is not None:
      if 0 in sizes:
        raise ValueError(
          f"part {list(sizes).index(0)} of the mixture has no prompt within the limit; "
          "leave the part out, or allow longer prompts"
        )
      # Importing Grain takes a second; only weighted mixtures need it.
      from tunix.data.batching import draws

      options = {"shuffle": seed is not None, "seed": seed or 0, "later": later}
      self._draws = draws.weighted_draws(sizes, weights, num_epochs=None, **options)

  def order(self, epoch: int) -> Any:
    """Returns the row numbers of an epoch, which depend only on seed and epoch."""
    count = len(self.rows)
    if self._draws is not None:
      return self._draws[epoch * count : (epoch + 1) * count]
    if self.seed is None:
      return range(count)
    return np.random.default_rng((self.seed, epoch)).permutation(count)

  def __iter__(self) -> _Batches:
    return _Batches(self)

  def __length_hint__(self) -> int:
    """Returns the number of batches of all passes; 0 if they never end."""
    return (self.epochs or 0) * -(-len(self.rows) // self.size)

  def __repr__(self) -> str:
    epochs = "endless" if self.epochs is None else f"{self.epochs} epochs"
    return (
      f"PromptBatches({len(self.rows)} prompts in batches of {self.size}, {epochs})"
    )


class _Batches(Iterator[dict[str, list[Any]]]):
  def __init__(self, source: PromptBatches):
    self._source, self._drawn = source, 0
    self._epoch: int = -1
    self._order: Any = ()

  def __next__(self) -> dict[str, list[Any]]:
    source = self._source
    per_epoch = -(-len(source.rows) // source.size)
    epoch, number = divmod(self._drawn, per_epoch)
    if source.epochs is not None and epoch >= source.epochs:
      raise StopIteration
    if epoch != self._epoch:
      self._epoch, self._order = epoch, source.order(epoch)
    start = number * source.size
    places = range(start, min(start + source.size, len(source.rows)))
    batch = [source.rows[self._order[place]] for place in places]
    self._drawn += 1
    return as_columns(batch)

  def get_state(self) -> dict[str, int]:
    return {"drawn": self._drawn}

  def set_state(self, state: dict[str, int]) -> None:
    self._drawn = state["drawn"]
