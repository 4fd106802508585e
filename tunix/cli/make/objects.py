"""Objects of a Python program that stand in a configuration under a name.

`tunix.sft(model=model, data=records)` takes objects where the command has paths. The
configuration holds a name such as "<model.path: Qwen3>" in place of each object, so
that it stays plain: it can be compared, written to config.yaml, and printed.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, TypeGuard

_objects: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar(
  "objects", default=None
)


@contextlib.contextmanager
def holding() -> Iterator[None]:
  """Keeps the objects that `name_of` names until the end of the block."""
  token = _objects.set({})
  try:
    yield
  finally:
    _objects.reset(token)


def name_of(value: object, key: str) -> str:
  """Returns the name of an object for a configuration; call it in `holding`.

  Args:
    value: the object.
    key: the key that the object is a value of.
  """
  held = _objects.get()
  assert held is not None
  text = getattr(value, "__name__", type(value).__name__).strip("<>")
  name = f"<{key}: {text}>"
  if held.get(name, value) is not value:  # two functions called reward
    name = f"<{key}: {text} {len(held) + 1}>"
  held[name] = value
  return name


def is_name(text: str | None) -> TypeGuard[str]:
  """Returns True for the name of an object, False for a path or a call string."""
  return text is not None and text.startswith("<") and text.endswith(">")


def get(name: str) -> Any:
  """Returns the object of a name.

  Raises:
    ValueError: the object belonged to another call or another process.
  """
  held = _objects.get() or {}
  if name not in held:
    key = name[1:].partition(":")[0]
    raise ValueError(
      f"{key} is {name}, an object of a Python program that is gone. Call the function "
      f"of tunix again with the object, or set {key} to a path"
    )
  return held[name]
