"""Micro-batches one by one, from a place in the data that can be saved."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from tunix.sft import iterator_state

_log = logging.getLogger(__name__)


class BatchSource:
  """Draws from a dataset, or from a function, and knows where it is.

  Iterators with `get_state` and `set_state` (Grain's) are saved and restored by their
  own state, any other by drawing and dropping what was consumed. Their state is read
  when it is asked for, not at every batch: it can be as large as the data.

  Args:
    dataset: an iterable of micro-batches; may be None when there is a function.
    draw: gives the next one, None at the end; it goes before the dataset.
    saved: what `state` returned, None at the start of a run.
  """

  def __init__(
    self,
    dataset: Iterable[Any] | None,
    draw: Callable[[], Any] | None = None,
    saved: dict[str, Any] | None = None,
  ):
    self._drawn = 0
    self._taken: list[Any] = []  # since the last `mark`
    self._again: list[Any] = []  # to be given once more
    if draw is None and dataset is None:
      raise ValueError(
        "no training data: pass an iterable of micro-batches to train(), or data hooks "
        "with load_next_train_batch"
      )
    self._iterator: Any = None if dataset is None or draw else iter(dataset)
    self._draw = draw or self._draw_from_iterator
    if saved is not None:
      self._resume(saved)
    known = iterator_state.read(self._iterator, warn=True)
    self._known: tuple[int, dict[str, Any]] = self._drawn, known

  @property
  def drawn(self) -> int:
    """Micro-batches drawn since the run began."""
    return self._drawn

  def take(self, count: int) -> list[Any]:
    """The next micro-batches: fewer at the end, none behind it."""
    self.mark()
    while len(self._taken) < count and self.next() is not None:
      pass
    return self._taken

  def mark(self) -> None:
    """`go_back` goes back to no place before this one."""
    self._taken = []

  def continues(self, dataset: Any) -> bool:
    """Whether drawing from `dataset` would go on with this very iterator: a generator,
    which cannot be started anew and has no state to go back to."""
    live = self._iterator is not None and self._iterator is dataset
    return live and not hasattr(dataset, "get_state")

  def go_back(self, drawn: int) -> None:
    """Gives what was drawn beyond `drawn`, since the last `take` or `mark`, anew.

    Raises:
      ValueError: more was drawn since: an older checkpoint was restored.
    """
    unused = self._drawn - drawn
    if not 0 <= unused <= len(self._taken):
      raise ValueError(
        f"the run stands behind {drawn} micro-batches, and the generator that it draws "
        f"from has given {self._drawn}: pass data that can be iterated anew, or a "
        "generator that begins at the first micro-batch"
      )
    kept = len(self._taken) - unused
    self._again = [*self._taken[kept:], *self._again]
    self._taken, self._drawn = self._taken[:kept], drawn

  def next(self) -> Any:
    """The next micro-batch; None at the end."""
    batch = self._again.pop(0) if self._again else self._draw()
    if batch is not None:
      self._drawn += 1
      self._taken.append(batch)
    return batch

  def _draw_from_iterator(self) -> Any:
    for batch in self._iterator:
      if batch is None:  # it would pass for the end, and what is behind it be lost
        raise ValueError(
          f"the training data yielded None after {self._drawn} micro-batches: leave "
          "out what is no batch"
        )
      return batch
    return None

  def remember(self) -> None:
    """Reads the iterator's own state here: `state` of this place, and of places behind
    it, rests on it."""
    self._known = self._drawn, iterator_state.read(self._iterator)

  def state(self, drawn: int | None = None) -> dict[str, Any]:
    """The place after `drawn` micro-batches, as JSON.

    Args:
      drawn: not before the last `remember`; None: all that were drawn.
    """
    place: int = self._drawn if drawn is None else drawn
    if place == self._drawn and not self._again:
      self.remember()
    at, known = self._known
    skip = {"skip": place - at} if known and place > at else {}
    return {"drawn": place, **known, **skip}

  def _resume(self, saved: dict[str, Any]) -> None:
    if iterator_state.restore(self._iterator, saved):
      self._drawn = saved["drawn"] - saved.get("skip", 0)
    else:
      _log.warning(
        "the training data has no saved state: drawing and dropping the %d "
        "micro-batches that were consumed; it must yield the same ones in the same "
        "order",
        saved["drawn"],
      )
    while self._drawn < saved["drawn"]:
      self.mark()
      if self.next() is None:
        raise ValueError(
          f"the training data ended after {self._drawn} micro-batches, but the run had "
          f"consumed {saved['drawn']}: resume with the data it was started with"
        )
