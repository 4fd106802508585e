"""BatchSource: draws micro-batches, and saves and restores its place in the data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from tunix.sft.steps import iterator_state
from tunix.utils import terminal

_log = logging.getLogger(__name__)


class BatchSource:
  """Draws micro-batches from a dataset or a function, and counts them.

  The place of an iterator with `get_state` and `set_state` (Grain's) is its state. The
  place of another iterator is the number of batches; it is restored by drawing and
  dropping as many. An iterator's state is read for a checkpoint only, not for every
  batch, because it can be as large as the data.

  Args:
    dataset: an iterable of micro-batches; may be None if `draw` is given.
    draw: function that returns the next micro-batch, None at the end; it replaces the
      dataset.
    saved: a result of `state`; None at the start of a run.
  """

  def __init__(
    self,
    dataset: Iterable[Any] | None,
    draw: Callable[[], Any] | None = None,
    saved: dict[str, Any] | None = None,
  ):
    self._drawn = 0
    self._taken: list[Any] = []  # batches drawn since the last `mark`
    self._returned: list[Any] = []  # batches that `go_back` has put back
    if draw is None and dataset is None:
      raise ValueError(
        "no training data: pass an iterable of micro-batches to train(), or data hooks "
        "with load_next_train_batch"
      )
    self._iterator: Any = None if dataset is None or draw else iter(dataset)
    self._draw = draw or self._draw_from_iterator
    if saved is not None:
      self._resume(saved)
    state = iterator_state.read(self._iterator, warn=True)
    self._known: tuple[int, dict[str, Any]] = self._drawn, state

  @property
  def drawn(self) -> int:
    """The number of micro-batches drawn since the run began."""
    return self._drawn

  def take(self, count: int) -> list[Any]:
    """Returns the next `count` micro-batches; fewer at the end of the data."""
    self.mark()
    while len(self._taken) < count and self.next() is not None:
      pass
    return self._taken

  def mark(self) -> None:
    """Forgets the drawn batches, so that `go_back` cannot pass this place."""
    self._taken = []

  def continues(self, dataset: object) -> bool:
    """Returns True if `dataset` is the generator that this source draws from.

    A generator cannot be restarted and has no state to restore, so a further call of
    `train` must continue with this source.
    """
    is_same = self._iterator is not None and self._iterator is dataset
    return is_same and not hasattr(dataset, "get_state")

  def go_back(self, drawn: int) -> None:
    """Puts the batches after the first `drawn` ones back, to be drawn again.

    Only batches since the last `take` or `mark` can be put back.

    Raises:
      ValueError: More batches were drawn since, because an older checkpoint was
        restored.
    """
    unused = self._drawn - drawn
    if not 0 <= unused <= len(self._taken):
      raise ValueError(
        f"the run has consumed {terminal.counted(drawn, 'micro-batch')}, and the "
        f"generator has given {self._drawn}. Pass data that can be iterated again, or "
        "a new generator that starts at the first micro-batch."
      )
    used = len(self._taken) - unused
    self._returned = [*self._taken[used:], *self._returned]
    self._taken, self._drawn = self._taken[:used], drawn

  def next(self) -> Any:
    """Returns the next micro-batch; None at the end of the data."""
    batch = self._returned.pop(0) if self._returned else self._draw()
    if batch is not None:
      self._drawn += 1
      self._taken.append(batch)
    return batch

  def _draw_from_iterator(self) -> Any:
    for batch in self._iterator:
      if batch is None:  # None would be taken for the end of the data
        drawn = terminal.counted(self._drawn, "micro-batch")
        raise ValueError(
          f"the training data yielded None after {drawn}; expected a batch. Leave the "
          "None out."
        )
      return batch
    return None

  def remember(self) -> None:
    """Reads the iterator's state; `state` derives this place and later ones from it."""
    self._known = self._drawn, iterator_state.read(self._iterator)

  def state(self, drawn: int | None = None) -> dict[str, Any]:
    """Returns the place after `drawn` micro-batches, as JSON.

    Args:
      drawn: number of micro-batches, not less than at the last `remember`; None: all
        micro-batches drawn so far.
    """
    place: int = self._drawn if drawn is None else drawn
    if place == self._drawn and not self._returned:
      self.remember()
    at, state = self._known
    # A later place than that of the iterator's state: a resumed run draws and drops the
    # batches between the two.
    skip = {"skip": place - at} if state and place > at else {}
    return {"drawn": place, **state, **skip}

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
        drawn = terminal.counted(self._drawn, "micro-batch")
        raise ValueError(
          f"the training data ended after {drawn}, but the run had consumed "
          f"{saved['drawn']}: resume with the data it was started with"
        )
