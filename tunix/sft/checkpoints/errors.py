"""Errors of reading and writing checkpoints, and their causes."""

from __future__ import annotations

import re
from typing import Any

from tunix.utils import coordination


class MismatchError(ValueError):
  """A checkpoint of another model; older checkpoints of the run do not fit either."""


def means_damage(error: Exception) -> bool:
  """Returns True if an error comes from damaged files, not from the machine."""
  text = str(error)
  machine = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory", "bad_alloc")
  if isinstance(error, MemoryError) or any(word in text for word in machine):
    return False
  return isinstance(error, FileNotFoundError) or not isinstance(error, OSError)


def describe(error: BaseException) -> str:
  """Returns the reason of an error in one line, such as "No space left on device"."""
  text = (str(error) or type(error).__name__).splitlines()[0]
  # tensorstore names the file several times before the system's reason.
  system = re.search(r": ([^:]+) \[os_error_code='\d+'\]", text)
  return system[1] if system else text[:300]


class named_failure:
  """Context that turns the error of a failed write into one OSError with a remedy.

  Args:
    root: the folder of the checkpoints.
    step: the step of the checkpoint; None if it is unknown.
  """

  def __init__(self, root: str | None, step: int | None):
    self._what = f"checkpoint {step} in {root}" if step is not None else f"in {root}"

  def __enter__(self) -> None:
    return None

  def __exit__(self, kind: object, error: Any, traceback: object) -> None:
    if error is None or isinstance(error, coordination.AbsentError):
      return  # the failure of another process names that process
    text = str(error)
    full = isinstance(error, OSError) or "No space left" in text or "ENOSPC" in text
    full = full or "RESOURCE_EXHAUSTED" in text or "File too large" in text
    if full:
      raise OSError(
        f"a checkpoint could not be written ({self._what}): "
        f"{describe(error)}. Earlier checkpoints are unchanged: make "
        "room and start the same run again"
      ) from error
