"""Reading of a request's fields: types, ranges, and no unknown field."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tunix.serve.http.errors import ApiError, bad

# Fields that never change an answer. They are accepted and named in the header
# `x-ignored-fields`.
HARMLESS = frozenset(
  {
    *("user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    # The cache of prefixes never changes tokens, and is salted with the version of the
    # weights; it is not split by this text.
    "cache_salt",
  }
)


class Fields:
  """The fields of a JSON object; a route takes each field that it knows.

  A field with the value null counts as absent, as in OpenAI's API. `end` refuses the
  fields that were not taken.
  """

  def __init__(self, content: Mapping[str, Any], prefix: str = ""):
    self._left = {key: value for key, value in content.items() if value is not None}
    self._prefix = prefix
    self.ignored: list[str] = []

  def name(self, field: str) -> str:
    """Returns the name of a field for messages."""
    return f"{self._prefix}{field}"

  def raw(self, field: str, default: object = None) -> Any:
    """Takes a field of any type."""
    return self._left.pop(field, default)

  def has(self, field: str) -> bool:
    """Returns True if a field is there and was not taken."""
    return field in self._left

  def flag(self, field: str, default: bool = False) -> bool:
    """Takes true or false."""
    value = self.raw(field, default)
    return value if isinstance(value, bool) else self._refuse(field, value, "a boolean")

  def text(self, field: str, default: object = None) -> Any:
    """Takes a string."""
    value = self.raw(field, default)
    if value is default or isinstance(value, str):
      return value
    return self._refuse(field, value, "a string")

  def whole(
    self, field: str, default: object = None, low: int = 0, high: int = 2**31 - 1
  ) -> Any:
    """Takes an integer from `low` to `high`."""
    value = self.raw(field, default)
    if value is default or (is_whole(value) and low <= value <= high):
      return value
    return self._refuse(field, value, f"an integer from {low} to {high}")

  def number(
    self, field: str, default: object = None, low: float = 0, high: float = math.inf
  ) -> Any:
    """Takes a number from `low` to `high`."""
    value = self.raw(field, default)
    if value is default:
      return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and low <= value <= high:
      return float(value)
    return self._refuse(field, value, f"a number from {low:g} to {high:g}")

  def texts(self, field: str, most: int | None = None) -> tuple[str, ...]:
    """Takes a string, or a list of strings; `most` is its longest length."""
    value = self.raw(field, [])
    self._check_length(field, value, most, "texts")
    items = [value] if isinstance(value, str) else value
    if isinstance(items, list) and all(isinstance(item, str) for item in items):
      return tuple(items)
    return self._refuse(field, value, "a string or a list of strings")

  def wholes(self, field: str, most: int | None = None) -> list[int] | None:
    """Takes a list of integers of at least 0; `most` is its longest length."""
    value = self.raw(field)
    self._check_length(field, value, most, "ids")
    if value is None or is_ids(value):
      return value
    return self._refuse(field, value, "a list of token ids")

  def _check_length(
    self, field: str, value: object, most: int | None, what: str
  ) -> None:
    if most is not None and isinstance(value, list) and len(value) > most:
      raise bad(
        self.name(field),
        f"{self.name(field)} has {len(value)} {what}, expected at most {most}",
        "invalid_value",
      )

  def object(self, field: str) -> dict[str, Any]:
    """Takes a JSON object; empty if there is none."""
    value = self.raw(field, {})
    return value if isinstance(value, dict) else self._refuse(field, value, "an object")

  def neutral(self, **values: Sequence[Any]) -> None:
    """Takes unsupported fields, and refuses values that would have an effect."""
    for field, allowed in values.items():
      value = self.raw(field, allowed[0])
      same = any(value == x and type(value) in _kinds(x) for x in allowed)
      if not same:
        raise bad(
          self.name(field),
          f"{self.name(field)} is {shown(value)}, which this server does not support; "
          f"expected {allowed[0]!r}. Leave the field out",
          "unsupported_parameter",
        )

  def end(self, harmless: frozenset[str] = HARMLESS) -> None:
    """Refuses every field that was not taken.

    Args:
      harmless: fields that are named in `ignored` instead.
    """
    unknown = sorted(self._left.keys() - harmless)
    if unknown:
      raise bad(
        self.name(unknown[0]),
        f"unknown fields: {', '.join(shown(self.name(x), 60) for x in unknown[:8])}. "
        "Leave them out: this server ignores no field that may change an answer",
        "unknown_parameter",
      )
    self.ignored += [self.name(x) for x in sorted(self._left)]

  def _refuse(self, field: str, value: object, expected: str) -> Any:
    name = self.name(field)
    raise bad(name, f"{name} is {shown(value)}, expected {expected}", "invalid_value")


def is_whole(value: object) -> bool:
  """Returns True for an integer; booleans are none."""
  return isinstance(value, int) and not isinstance(value, bool)


def is_ids(value: object) -> bool:
  """Returns True for a list of integers from 0 to the largest int32."""
  return isinstance(value, list) and all(
    is_whole(item) and 0 <= item < 2**31 for item in value
  )


def shown(value: object, most: int = 200) -> str:
  """Returns a value as short text for a message."""
  text = "".join(_pieces(value, most + 1))
  return text if len(text) <= most else f"{text[:most]}..."


def _pieces(value: object, most: int) -> Iterator[str]:
  # Cuts a list first: writing out a million ids takes 50 ms.
  if isinstance(value, list | str) and len(value) > most:
    value = value[:most]
  yield repr(value)[: most + 1]


def _kinds(value: object) -> tuple[type, ...]:
  return (bool,) if isinstance(value, bool) else (int, float, type(value))


def missing(field: str) -> ApiError:
  """Returns the error of a field that a route needs."""
  return bad(field, f"{field} is missing", "missing_field")
