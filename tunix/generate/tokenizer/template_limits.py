"""Limits of a chat template: steps of a rendering and lengths of its values."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence, Sized
from typing import Any

_MOST_STEPS = 5_000_000  # of one rendering: a few seconds
STEPS_OF_CALL = 8  # a macro takes microseconds
_MOST_CHARACTERS = 1 << 24  # of one value; a number has at most as many bits
# Formats whose width comes from an argument or has seven digits.
_WIDE = re.compile(r"%[-+ #0]*(\*|\d{7})|:[^}]*(\{|\d{7})|\.\d{7}")
# Methods and filters whose result grows with a number among their arguments.
_PADDING = frozenset(
  {
    *("batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "slice"),
    *("to_bytes", "tojson", "truncate", "wordwrap", "zfill"),
  }
)


class ChatTemplateError(ValueError):
  """A template is malformed, or fails on a conversation."""


class ChatTemplateCostError(ChatTemplateError):
  """A template takes too many steps, or builds a value that is too long."""


class _Budget(threading.local):
  """The steps that the current rendering of each thread has taken."""

  steps = 0

  def take(self, steps: int) -> None:
    self.steps += steps
    if self.steps > _MOST_STEPS:
      raise ChatTemplateCostError(
        f"the chat template takes more than {_MOST_STEPS:,} steps; expected loops over "
        "the messages. Correct the template, or use another model folder."
      )


BUDGET = _Budget()


def _size(value: object) -> int:
  """Returns the steps that a value counts: its items, and its text / 256.

  Items within items count, too: a list that holds the same list twice, forty times
  over, is small in memory, and its text has no end.
  """
  total, left = 0, [value]
  while left and total <= _MOST_STEPS:
    item = left.pop()
    if isinstance(item, str):
      total += len(item) >> 8
    elif isinstance(item, list | tuple):
      total += 1 + len(item)
      left.extend(item)
    elif isinstance(item, dict):
      total += 1 + len(item)
      left.extend(item.values())
  return total


def spend(value: object) -> Any:
  """Takes the steps of a value and returns it; of a container only its own items."""
  if isinstance(value, str | bytes):
    # Short texts are free, for speed: every round of a loop takes a step anyway.
    if len(value) >= 256:
      _check_length(len(value))
      BUDGET.take(len(value) >> 8)
  else:
    # Lists of messages are copied often, and cheap.
    BUDGET.take(1 + (len(value) >> 3 if isinstance(value, list | tuple | dict) else 0))
  return value


def spend_read(value: object) -> Any:
  """Takes the steps of reading a value, and of texts directly in it, and returns it.

  Comparing two long texts, or searching one, takes time without building anything.
  """
  if isinstance(value, list | tuple | dict):
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    for item in inner:
      if isinstance(item, str | bytes) and len(item) >= 256:
        BUDGET.take(len(item) >> 8)
  return spend(value)


def spend_all(value: object) -> Any:
  """Takes the steps of a value and of everything in it, and returns it."""
  BUDGET.take(_size(value))
  return value


def _check_length(length: int) -> None:
  if length > _MOST_CHARACTERS:
    raise ChatTemplateCostError(
      f"the chat template builds a value of length {length:.3g}; expected at most "
      f"{_MOST_CHARACTERS:,}. Correct the template, or use another model folder."
    )


def check_operation(operator: str, left: object, right: object) -> None:
  """Refuses a power, a product or a formatted text that is too long."""
  if operator == "%" and isinstance(left, str | bytes):
    check_call("format", (left, right))
  elif operator == "**" and isinstance(left, int) and isinstance(right, int):
    # A number of 100,000 bits takes microseconds; the time grows with the square.
    _check_length(left.bit_length() * max(right, 0) * 128)
  elif operator == "*" and isinstance(left, int) and isinstance(right, int):
    _check_length((left.bit_length() + right.bit_length()) * 128)
  elif operator == "*":
    for items, count in ((left, right), (right, left)):
      if isinstance(count, int) and isinstance(items, Sized):
        _check_length(len(items) * max(count, 0))


def check_call(name: str, args: Sequence[Any]) -> None:
  """Refuses a call of a method or filter whose result is too long.

  Args:
    name: name of the method or filter.
    args: the value, and the arguments.
  """
  if name in _PADDING:
    count = max((abs(arg) for arg in args[1:] if isinstance(arg, int)), default=0)
    lines = 1 << 14
    if isinstance(args[0], str) and name != "tojson":
      lines = 1 + args[0].count("\n") + args[0].count("\t")
    _check_length(count if name in ("batch", "slice") else count * lines)
  elif name == "format" and isinstance(args[0], str | bytes):
    text = args[0] if isinstance(args[0], str) else args[0].decode("latin-1")
    if _WIDE.search(text):
      _check_length(_MOST_CHARACTERS + 1)
    _check_length(sum(len(arg) for arg in args if isinstance(arg, str)))
  elif name == "replace" and len(args) >= 3:
    text, old, new = (str(arg) for arg in args[:3])
    _check_length(len(text) + text.count(old) * len(new))
  elif name == "join":
    # The method has the separator first, the filter last, if at all.
    separator = sum(len(arg) for arg in args if isinstance(arg, str))
    for texts in (arg for arg in args if isinstance(arg, list | tuple)):
      _check_length(sum(separator + len(x) for x in texts if isinstance(x, str)))
