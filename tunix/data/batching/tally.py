"""Counters of events that log a warning only at the first, 10th, 100th, ... event."""

from __future__ import annotations

import collections
import logging

_log = logging.getLogger(__name__)


class Tally:
  """Counts events by name, and warns at the first, 10th, 100th and so on.

  Attributes:
    counts: number of events so far, by name.
  """

  def __init__(self):
    self.counts: collections.Counter[str] = collections.Counter()

  def add(self, name: str, detail: str = "") -> None:
    """Counts one event; `detail` is printed with the warning."""
    self.counts[name] += 1
    total = self.counts[name]
    if total == 10 ** (len(str(total)) - 1):
      _log.warning("%s so far: %d%s", name, total, f" ({detail})" if detail else "")
