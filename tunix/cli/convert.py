"""Values from YAML and argv as the types that the schema names."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Argument:
  """A value from the command line: as YAML reads it, and as it was typed."""

  value: Any
  text: str


def convert(value: Any, hint: Any, key: str) -> Any:
  """`value` as the type `hint`: str, bool, int, float, Literal, tuple, dict with
  string keys, or one of these or None. Integers pass as floats; what was typed for a
  string passes as it is, although YAML reads "17" as a number.

  Raises:
    ValueError: another type; begins with `key`, and says what was found and expected.
  """
  found = value.value if isinstance(value, Argument) else value
  options = _options(hint)
  for option in options:
    done, result = _as(found, option, key)
    if done:
      return result
  if isinstance(value, Argument) and str in options:
    return value.text
  raise ValueError(f"{key} is {describe(found)}, expected {_name_all(options)}")


def at_least(low: int, **values: Any) -> None:
  """Refuses numbers below `low`; keys are written with "__" for the dot.

  Raises:
    ValueError: begins with the key.
  """
  for name, value in values.items():
    if value is not None and not value >= low:
      key = name.replace("__", ".")
      raise ValueError(f"{key} is {value}: it must be at least {low}")


def plain(config: Any) -> dict[str, Any]:
  """A configuration as nested plain values, as YAML and JSON have them."""

  def entry(value: Any) -> Any:
    if isinstance(value, dict):
      return {key: entry(inner) for key, inner in value.items()}
    return list(value) if isinstance(value, tuple) else value

  return entry(dataclasses.asdict(config))


def flatten(config: Any) -> dict[str, Any]:
  """{"training.max_steps": ...}; open mappings stay whole."""
  flat: dict[str, Any] = {}
  for key, value in plain(config).items():
    if dataclasses.is_dataclass(getattr(config, key)):
      flat |= {f"{key}.{name}": entry for name, entry in value.items()}
    else:
      flat[key] = value
  return flat


def defaults(config: type) -> dict[str, Any]:
  """`flatten` of what the sections of a configuration are without a file."""
  sections = {
    field.name: field.default
    for field in dataclasses.fields(config)
    if dataclasses.is_dataclass(field.default)
  }
  return {
    f"{name}.{key}": value
    for name, section in sections.items()
    for key, value in plain(section).items()
  }


def is_open(hint: Any) -> bool:
  """Whether a field is a mapping whose keys the schema does not list."""
  return typing.get_origin(hint) is dict


def describe(value: Any) -> str:
  """A value with its type, for messages."""
  if value is None:
    return "null"
  if isinstance(value, bool):
    return "true" if value else "false"
  names = {int: "number", float: "number", str: "text", list: "list", dict: "mapping"}
  return f"the {names.get(type(value), type(value).__name__)} {value!r}"


def _options(hint: Any) -> list[Any]:
  if typing.get_origin(hint) in (typing.Union, types.UnionType):
    return list(typing.get_args(hint))
  return [hint]


def _as(value: Any, option: Any, key: str) -> tuple[bool, Any]:
  """(whether the value is of this type, the value)."""
  origin = typing.get_origin(option)
  if origin is Literal:
    return isinstance(value, str) and value in typing.get_args(option), value
  if origin is tuple:
    kind = typing.get_args(option)[0]
    entries = value if isinstance(value, list | tuple) else [None]
    parts = [_as(entry, kind, key) for entry in entries]
    return all(done for done, _ in parts), tuple(entry for _, entry in parts)
  if origin is dict:
    named = isinstance(value, dict) and all(isinstance(name, str) for name in value)
    return named, _entries(value, option, key) if named else None
  if option is type(None):
    return value is None, None
  if isinstance(value, bool) and option is not bool:
    return False, None
  if option is float and isinstance(value, int):
    return True, float(value)
  return isinstance(value, option), value


def _entries(value: Any, option: Any, key: str) -> Any:
  _, kind = typing.get_args(option)
  if kind is Any:
    return value
  return {name: convert(entry, kind, f"{key}.{name}") for name, entry in value.items()}


def _name_all(options: list[Any]) -> str:
  return " or ".join(_name(option) for option in options)


def _name(option: Any) -> str:
  origin = typing.get_origin(option)
  if origin is Literal:
    return "one of " + ", ".join(typing.get_args(option))
  names = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}
  if origin is tuple:
    numbers = typing.get_args(option)[0] is float
    return "a list of numbers" if numbers else "a list of names"
  return names.get(option, "null" if option is type(None) else "a mapping of names")
