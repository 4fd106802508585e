"""Exceptions of other people's code as text. It imports only the standard library."""

from __future__ import annotations

import pathlib
import traceback

MAX_MESSAGE = 400  # characters of a message that are kept


def message_of(error: BaseException) -> str:
  """Returns the message of an exception that a user's code may have raised."""
  try:
    return str(error)
  except Exception:  # a user's __str__ may raise as well
    return "(its message cannot be shown)"


def describe(error: BaseException) -> str:
  """Returns the type, message and file position of an exception, in one line."""
  message = message_of(error)
  frames = traceback.extract_tb(error.__traceback__)
  place = f" ({pathlib.Path(frames[-1].filename).name}:{frames[-1].lineno})"
  text = f"{type(error).__name__}: {message}" if message else type(error).__name__
  return " ".join(text[:MAX_MESSAGE].split()) + (place if frames else "")
