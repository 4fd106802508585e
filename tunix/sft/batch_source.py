"""Micro-batches one by one, from a place in the data that can be saved."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

_log = logging.getLogger(__name__)


class BatchSource:
  """Draws from a dataset, or from a function, and knows where it is.

  Iterators with `get_state` and `set_state` (Grain's) are saved and restored by their
  own state; any other is resumed by drawing and dropping what was consumed.

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
    self._draw = draw or (lambda: next(self._iterator, None))
    if saved is not None:
      self._resume(saved)

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
    """Gives what was drawn beyond `drawn`, since the last `take` or `mark`, anew."""
    unused = self._drawn - drawn
    assert 0 <= unused <= len(self._taken)
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

  def state(self) -> dict[str, Any]:
    """The place after the last drawn batch, as JSON."""
    state: dict[str, Any] = {"drawn": self._drawn}
    if hasattr(self._iterator, "get_state"):
      own = self._iterator.get_state()
      key = "iterator_bytes" if isinstance(own, bytes) else "iterator"
      state[key] = own.decode() if isinstance(own, bytes) else own
    return state

  def _resume(self, saved: dict[str, Any]) -> None:
    own = saved.get("iterator", saved.get("iterator_bytes"))
    if own is not None and hasattr(self._iterator, "set_state"):
      own = own.encode() if "iterator_bytes" in saved else own
      self._iterator.set_state(own)
      self._drawn = saved["drawn"]
      return
    _log.warning(
      "the training data has no saved state: drawing and dropping the %d micro-batches "
      "that were consumed; it must yield the same ones in the same order",
      saved["drawn"],
    )
    while self._drawn < saved["drawn"]:
      self.mark()
      if self.next() is None:
        raise ValueError(
          f"the training data ended after {self._drawn} micro-batches, but the run had "
          f"consumed {saved['drawn']}: resume with the data it was started with"
        )
