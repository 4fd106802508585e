"""Stop strings: their limits, and one search for all of them."""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Sequence

# Limits of a request. The engine's thread searches each completion after each launch: a
# search of 2,000 characters takes 2 ms at the worst, and 10 us for two short texts.
MOST = 64
MOST_CHARACTERS = 1024  # of all stop strings together


class StopStrings(Sequence[str]):
  """Stop strings that are compiled into one expression.

  Args:
    texts: the stop strings.

  Attributes:
    longest_bytes: length of the longest one in bytes; 0 if there is none.
  """

  def __init__(self, texts: Sequence[str]):
    self._texts = tuple(texts)
    self._sorted = sorted(self._texts)
    self._longest = max(map(len, self._texts), default=0)
    self._expression = re.compile("|".join(map(re.escape, self._texts)))
    self.longest_bytes = max((len(text.encode()) for text in self._texts), default=0)

  def __len__(self) -> int:
    return len(self._texts)

  def __getitem__(self, index):
    return self._texts[index]

  def place(self, text: str) -> int | None:
    """Returns the index at which the first stop string in a text begins, or None."""
    match = self._expression.search(text) if self._texts else None
    return None if match is None else match.start()

  def held(self, text: str) -> int:
    """Returns the length of the end of a text that may begin a stop string."""
    for size in range(min(self._longest - 1, len(text)), 0, -1):
      end = text[-size:]
      # In the order of strings, those that begin with `end` are the next ones after it.
      next_one = bisect.bisect_left(self._sorted, end)
      if next_one < len(self) and self._sorted[next_one].startswith(end):
        return size
    return 0


def compiled(texts: Sequence[str]) -> StopStrings:
  """Returns compiled stop strings; those that were used last are kept."""
  return texts if isinstance(texts, StopStrings) else _compiled(tuple(texts))


_compiled = functools.lru_cache(maxsize=64)(StopStrings)


def check(texts: Sequence[str], name: str = "stop_strings") -> None:
  """Checks the limits of stop strings.

  Args:
    texts: the stop strings.
    name: name of the option in messages.

  Raises:
    ValueError: a text is empty, or the texts are too many or too long.
  """
  if len(texts) > MOST:
    raise ValueError(
      f"{name} has {len(texts)} texts, expected at most {MOST}: leave some out"
    )
  if not all(texts):
    raise ValueError(
      f"{name} has an empty string: every row would stop at once, leave it out"
    )
  if (size := sum(map(len, texts))) > MOST_CHARACTERS:
    raise ValueError(
      f"{name} has {size} characters in all its texts, expected at most "
      f"{MOST_CHARACTERS}: shorten the texts"
    )
