"""Counts of what goes on and should be known, without a line for every one."""

from __future__ import annotations

import collections
import logging

_log = logging.getLogger(__name__)


class Tally:
  """Counts by name; warns at the first, the tenth, the hundredth ...

  Attributes:
    counts: so far.
  """

  def __init__(self):
    self.counts: collections.Counter[str] = collections.Counter()

  def add(self, what: str, detail: str = "") -> None:
    """One more of it."""
    self.counts[what] += 1
    total = self.counts[what]
    if total == 10 ** (len(str(total)) - 1):
      _log.warning("%s so far: %d%s", what, total, f" ({detail})" if detail else "")
