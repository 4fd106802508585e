"""Converts values of YAML and of the command line to the types of a dataclass."""

from __future__ import annotations

import collections.abc
import dataclasses
import pathlib
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

BOOL = "true|false"  # placeholder in help
DTYPES = ("float32", "bfloat16", "float16")

# Types of a value -> (name in the JSON Schema, name in messages).
_SCALARS = {
  str: ("string", "text"),
  bool: ("boolean", "true or false"),
  int: ("integer", "a whole number"),
  float: ("number", "a number"),
  pathlib.Path: ("string", "a path"),
  type(None): ("null", "null"),
}
_LISTS = (tuple, collections.abc.Sequence)
_MAPPINGS = (dict, collections.abc.Mapping)


@dataclasses.dataclass(frozen=True)
class Argument:
  """A value of the command line.

  Attributes:
    value: the value that YAML reads from the text.
    text: the text as it was typed.
  """

  value: Any
  text: str


@dataclasses.dataclass(frozen=True)
class Choice:
  """Annotation of a section whose key `name` chooses its dataclass.

  Used as `Annotated[Base, Choice({...})]`. Without a name the first class is taken. A
  null below the section means the default of the chosen class.

  Attributes:
    classes: dataclass by name.
  """

  classes: Mapping[str, type]

  @property
  def first(self) -> str:
    """The default name."""
    return next(iter(self.classes))

  def name_of(self, value: object) -> str:
    """Returns the name that chooses the class of `value`."""
    return next(name for name, cls in self.classes.items() if type(value) is cls)


def options(hint: object) -> list[Any]:
  """Returns the members of a type that a file can hold.

  These are scalars, Literal, lists, mappings, dataclasses and np.dtype. Functions,
  meshes and arrays only come from Python and are left out.
  """
  members = _members(hint)
  if np.dtype in members:  # jax.typing.DTypeLike is a union of text, types and more
    return [np.dtype, *(m for m in members if m is type(None))]
  return [m for m in members if _is_plain(m)]


def section_of(hint: object) -> type | Choice | None:
  """Returns the dataclass of a section, or its `Choice`; None for a field of values."""
  if typing.get_origin(hint) is typing.Annotated:
    marks = typing.get_args(hint)[1:]
    return next((mark for mark in marks if isinstance(mark, Choice)), None)
  return next((m for m in _members(hint) if _is_section(m)), None)


def item_of(hint: object) -> Any:
  """Returns the type of the items of a list; None for other types."""
  lists = (one for one in options(hint) if typing.get_origin(one) in _LISTS)
  return next((typing.get_args(one)[0] for one in lists), None)


def is_open(hint: object) -> bool:
  """Returns True for a mapping with free keys."""
  return any(typing.get_origin(option) in _MAPPINGS for option in options(hint))


def takes_null(hint: object) -> bool:
  """Returns True if null is a value of the field, and not only the absence of one."""
  return type(None) in options(hint)


def convert(value: object, hint: object, key: str) -> Any:
  """Converts `value` to the type `hint`.

  An integer passes as a float. The text of an `Argument` passes as a string, although
  YAML reads 17 as a number.

  Raises:
    ValueError: the value has another type; begins with `key` and gives both types.
  """
  plain_value = value.value if isinstance(value, Argument) else value
  for option in options(hint):
    done, result = _as(plain_value, option, key)
    if done:
      return result
  if isinstance(value, Argument) and str in options(hint):
    return value.text
  raise ValueError(f"{key} is {describe(plain_value)}, expected {describe_type(hint)}")


def without_text(value: object) -> Any:
  """Replaces each `Argument` in a nested value by its YAML value."""
  if isinstance(value, Argument):
    return value.value
  if isinstance(value, dict):
    return {key: without_text(entry) for key, entry in value.items()}
  return value


def plain(value: object) -> Any:
  """Converts a value to the types of YAML and JSON."""
  if isinstance(value, Mapping):
    return {key: plain(entry) for key, entry in value.items()}
  if isinstance(value, list | tuple):
    return [plain(entry) for entry in value]
  if isinstance(value, pathlib.Path):
    return str(value)
  if isinstance(value, np.dtype | type):
    return jnp.dtype(value).name
  return value


def describe(value: object) -> str:
  """Returns a value with its type, for messages."""
  if value is None:
    return "null"
  if isinstance(value, bool):
    return "true" if value else "false"
  names = {int: "number", float: "number", str: "text", list: "list", dict: "mapping"}
  return f"the {names.get(type(value), type(value).__name__)} {value!r}"


def describe_type(hint: object) -> str:
  """Returns the types that a field takes, for messages."""
  return " or ".join(_name(option) for option in options(hint))


def json_type(hint: object) -> dict[str, Any]:
  """Returns the JSON Schema of a type."""
  schemas = [_json_type(option) for option in options(hint)]
  return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def placeholder(hint: object) -> str:
  """Returns a placeholder of a value in help: N, TEXT, a|b."""
  schema = json_type(hint)
  one = schema.get("anyOf", [schema])[0]
  if "enum" in one:
    return "|".join(one["enum"])
  if pathlib.Path in options(hint):
    return "PATH"
  names = {"integer": "N", "number": "NUMBER", "boolean": BOOL}
  more = {"array": "[LIST]", "object": "{MAPPING}", "string": "TEXT"}
  return (names | more)[one["type"]]


def _members(hint: object) -> list[Any]:
  if typing.get_origin(hint) is typing.Annotated:
    return _members(typing.get_args(hint)[0])
  if typing.get_origin(hint) in (typing.Union, types.UnionType):
    return list(typing.get_args(hint))
  return [hint]


def _is_section(option: object) -> bool:
  return isinstance(option, type) and dataclasses.is_dataclass(option)


def _is_plain(option: object) -> bool:
  origin = typing.get_origin(option)
  if origin in _LISTS or origin in _MAPPINGS or origin is Literal:
    return True
  return option in _SCALARS or _is_section(option)


def _as(value: Any, option: Any, key: str) -> tuple[bool, Any]:
  """Returns (True if the value has this type, the converted value)."""
  origin = typing.get_origin(option)
  if origin is Literal:
    return isinstance(value, str) and value in typing.get_args(option), value
  if option is np.dtype:
    is_name = isinstance(value, str) and value in DTYPES
    # jnp.float32, as in Python code, so that a value read back equals the default.
    return is_name, getattr(jnp, value) if is_name else None
  if origin in _LISTS:
    kind = typing.get_args(option)[0]
    entries = value if isinstance(value, list | tuple) else [None]
    parts = [_as(entry, kind, key) for entry in entries]
    return all(done for done, _ in parts), tuple(entry for _, entry in parts)
  if origin in _MAPPINGS:
    kind = typing.get_args(option)[0]  # of names: text, or whole numbers
    named = isinstance(value, dict) and all(type(name) is kind for name in value)
    return named, _entries(value, option, key) if named else None
  if option is type(None):
    return value is None, None
  if isinstance(value, bool) and option is not bool:
    return False, None
  if option is pathlib.Path:
    is_text = isinstance(value, str)
    return is_text, pathlib.Path(value).expanduser() if is_text else None
  if option is float and isinstance(value, int):
    return True, float(value)
  return isinstance(value, option), value


def _entries(value: Any, option: object, key: str) -> Any:
  _, kind = typing.get_args(option)
  if kind is Any:
    return value
  return {name: convert(entry, kind, f"{key}.{name}") for name, entry in value.items()}


def _name(option: object) -> str:
  """Returns the name of a type in messages."""
  schema = _json_type(option)
  if "enum" in schema:
    return "one of " + ", ".join(schema["enum"])
  if schema["type"] == "array":
    numbers = typing.get_args(option)[0] in (int, float)
    return "a list of numbers" if numbers else "a list of names"
  return "a mapping of names" if option not in _SCALARS else _SCALARS[option][1]


def _json_type(option: object) -> dict[str, Any]:
  origin = typing.get_origin(option)
  if origin is Literal:
    return {"enum": list(typing.get_args(option))}
  if option is np.dtype:
    return {"enum": list(DTYPES)}
  if origin in _LISTS:
    return {"type": "array", "items": json_type(typing.get_args(option)[0])}
  return {"type": _SCALARS[option][0] if option in _SCALARS else "object"}
