"""Calls of matchers. A matcher that fails ends its own request only.

A constraint may be the caller's own class. The engine continues whatever that class
raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from tunix.generate.engine.request import RequestError
from tunix.generate.engine.scheduling.sequence import Sequence

T = TypeVar("T")


def mask(s: Sequence, size: int) -> np.ndarray | None:
  """Returns the allowed next tokens, uint32 [size]; None: all.

  A matcher that fails gives the completion its `failure`, and the mask is None.
  """
  matcher = s.matcher
  if matcher is None or s.failure is not None:
    return None

  def checked() -> np.ndarray:
    words = np.asarray(matcher.mask())
    if words.shape != (size,) or words.dtype != np.uint32:
      raise ValueError(
        f"the mask has shape {words.shape} and dtype {words.dtype}, expected ({size},) "
        "and uint32"
      )
    return words

  return _called(s, "mask", checked)


def accept(s: Sequence, tokens: np.ndarray) -> None:
  """Passes the drawn tokens to the matcher; if it fails, the completion fails."""
  matcher = s.matcher
  if matcher is None:
    return
  for token in tokens:
    if s.failure is None:
      _called(s, "accept", lambda token=int(token): matcher.accept(token))


def _called(s: Sequence, name: str, function: Callable[[], T]) -> T | None:
  try:
    return function()
  except RequestError as error:
    s.failure = error
  except Exception as error:  # from the caller's code: the error ends its request only
    s.failure = RequestError(
      f"{s.ticket.id}: {type(s.matcher).__name__}.{name} of the constraint raised "
      f"{type(error).__name__}: {error}. Correct the constraint"
    )
    s.failure.__cause__ = error
  return None
