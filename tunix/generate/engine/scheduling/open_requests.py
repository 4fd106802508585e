"""The open requests of an engine, which any thread may add to and cancel."""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence as Seq

from tunix.generate.engine.request import EngineDead, Ticket
from tunix.generate.engine.scheduling.sequence import Sequence


class OpenRequests:
  """The open requests, and the arrivals and cancellations since the last launch.

  Attributes:
    failure: the exception that ended the engine; None while it runs.
  """

  def __init__(self):
    self.failure: BaseException | None = None
    self._lock = threading.Lock()
    self._arrived: collections.deque[Sequence] = collections.deque()
    self._cancelled: list[Ticket] = []
    self._open: dict[Ticket, list[Sequence]] = {}

  def __contains__(self, ticket: Ticket) -> bool:
    return ticket in self._open

  def __len__(self) -> int:
    with self._lock:
      return len(self._open)

  def check_alive(self) -> None:
    """Raises EngineDead if the engine has ended."""
    if self.failure is not None:
      raise EngineDead(f"the engine does not run: {self.failure}") from self.failure

  def add(self, ticket: Ticket, sequences: list[Sequence]) -> None:
    """Opens a request; raises EngineDead if the engine has ended."""
    with self._lock:
      self.check_alive()
      self._open[ticket] = sequences
      self._arrived.extend(sequences)

  def cancel(self, ticket: Ticket | None = None) -> None:
    """Cancels a request at the next `take`; None: all of them."""
    with self._lock:
      self._cancelled += self._open if ticket is None else [ticket]

  def take(self) -> tuple[Seq[Sequence], list[Sequence]]:
    """Returns the completions that arrived, and the completions to cancel."""
    with self._lock:
      arrived, self._arrived = self._arrived, collections.deque()
      cancelled, self._cancelled = dict.fromkeys(self._cancelled), []
      # A completion may be in both results. The caller then puts it into the queue
      # first and removes it afterwards.
      return arrived, [s for ticket in cancelled for s in self._open.get(ticket, ())]

  def end(self, s: Sequence) -> None:
    """Removes an ended completion, and closes its request after the last one."""
    with self._lock:
      left = self._open.get(s.ticket)
      if left is not None and s in left:
        left.remove(s)
        if not left:
          del self._open[s.ticket]

  def fail(self, error: BaseException) -> None:
    """Answers all requests with EngineDead, and refuses later ones."""
    with self._lock:
      self.failure = error
      tickets, self._open = list(self._open), {}
      self._arrived.clear()
    for ticket in tickets:
      dead = EngineDead(f"{ticket.id}: the engine failed: {error}")
      dead.__cause__ = error
      ticket.put(dead)

  def users_of(self, adapter: int) -> list[str]:
    """Returns the names of the requests that use an adapter, by its number."""
    with self._lock:
      return [
        t.id for t, rows in self._open.items() for s in rows if s.adapter == adapter
      ]

  @property
  def arrivals(self) -> int:
    """Number of completions that arrived since the last `take`."""
    with self._lock:
      return len(self._arrived)

  @property
  def has_news(self) -> bool:
    """True if requests or cancellations arrived since the last `take`."""
    with self._lock:
      return bool(self._arrived or self._cancelled)
