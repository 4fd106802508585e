"""Single values of a JSON request, refused by name where they do not fit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeGuard

from tunix.tinker.errors import TinkerError

_INT32 = 2**31 - 1
_MOST_STORED = 2**14  # bytes as JSON


def text(body: Mapping[str, Any], name: str) -> str:
  """Returns a text of a JSON object.

  Raises:
    TinkerError: the field is missing or no text.
  """
  value = body.get(name)
  if not isinstance(value, str):
    raise _wrong(name, value, "a text")
  return value


def optional_text(body: Mapping[str, Any], name: str) -> str | None:
  """Returns a text of a JSON object, or None if it is missing."""
  return None if body.get(name) is None else text(body, name)


def integer(
  body: Mapping[str, Any], name: str, *, least: int = 0, most: int = _INT32
) -> int:
  """Returns an integer of a JSON object.

  Raises:
    TinkerError: the field is missing, or no integer from `least` to `most`.
  """
  value = body.get(name)
  if not is_whole(value, least, most):
    raise _wrong(name, value, f"an integer from {least} to {most}")
  return value


def whole(
  body: Mapping[str, Any],
  name: str,
  default: object,
  *,
  least: int = 0,
  most: int = _INT32,
) -> Any:
  """Returns an integer of a JSON object, or the default if it is missing or null."""
  if body.get(name) is None:
    return default
  return integer(body, name, least=least, most=most)


def is_whole(value: Any, least: int = 0, most: int = _INT32) -> TypeGuard[int]:
  """Returns True for an integer in a range."""
  is_integer = isinstance(value, int) and not isinstance(value, bool)
  return is_integer and least <= value <= most


def flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
  """Returns true or false of a JSON object, or the default if it is missing or null.

  Raises:
    TinkerError: the field is something else, such as the text "false".
  """
  value = body.get(name)
  if value is None:
    return default
  if not isinstance(value, bool):
    raise _wrong(name, value, "true or false")
  return value


def table(body: Mapping[str, Any], name: str) -> dict[str, Any]:
  """Returns an object of a JSON object.

  Raises:
    TinkerError: the field is missing or no object.
  """
  value = body.get(name)
  if not isinstance(value, dict):
    raise _wrong(name, value, "an object")
  return value


def small(body: Mapping[str, Any], name: str) -> Any:
  """Returns JSON values that are stored as they are; None if they are missing.

  Raises:
    TinkerError: they are too large.
  """
  value = body.get(name)
  if (size := len(json.dumps(value))) > _MOST_STORED:
    raise TinkerError(
      f"{name} has {size} bytes; expected at most {_MOST_STORED}. Shorten it"
    )
  return value


def metadata(body: Mapping[str, Any]) -> dict[str, Any] | None:
  """Returns the field `user_metadata`, or None; see `small` and `table`."""
  value = small(body, "user_metadata")
  return None if value is None else table(body, "user_metadata")


def _wrong(name: str, value: object, expected: str) -> TinkerError:
  shown = "missing" if value is None else repr(value)[:80]
  return TinkerError(f"{name} is {shown}; expected {expected}. Correct the field")
