"""What can be wrong with a checkpoint, and whose fault it is."""

from __future__ import annotations

from typing import Any


class MismatchError(ValueError):
  """A checkpoint of another model: its files are sound, an older one fits no better."""


def means_damage(error: Exception) -> bool:
  """Whether an error speaks of the files, not of this machine or its network."""
  text = str(error)
  machine = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory", "bad_alloc")
  if isinstance(error, MemoryError) or any(word in text for word in machine):
    return False
  return isinstance(error, FileNotFoundError) or not isinstance(error, OSError)


class named_failure:
  """Turns what a failed write raises into one OSError that says what to do."""

  def __init__(self, root: str | None, step: int | None):
    self._what = f"checkpoint {step} in {root}" if step is not None else f"in {root}"

  def __enter__(self) -> None:
    return None

  def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
    text = str(error) or type(error).__name__
    full = isinstance(error, OSError) or "No space left" in text or "ENOSPC" in text
    full = full or "RESOURCE_EXHAUSTED" in text or "File too large" in text
    if error is not None and full:
      raise OSError(
        f"a checkpoint could not be written ({self._what}): "
        f"{text.splitlines()[0][:300]}. Checkpoints written before are untouched: make "
        "room and start the same run again"
      ) from error
