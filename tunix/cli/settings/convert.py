"""Values from YAML and argv as the types that the fields of a dataclass name."""

from __future__ import annotations

import collections.abc
import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

DTYPES = ("float32", "bfloat16", "float16")

_SCALARS = {
  str: "text",
  bool: "true or false",
  int: "a whole number",
  float: "a number",
  type(None): "null",
}
_LISTS = (tuple, collections.abc.Sequence)
_MAPPINGS = (dict, collections.abc.Mapping)


@dataclasses.dataclass(frozen=True)
class Argument:
  """A value from the command line: as YAML reads it, and as it was typed."""

  value: Any
  text: str


@dataclasses.dataclass(frozen=True)
class Choice:
  """Says of a field that its key `name` chooses the dataclass: Annotated[Base,
  Choice({...})]. The first is taken where no name is given, and null below it means
  what the chosen one has by default.

  Attributes:
    classes: by name.
  """

  classes: Mapping[str, type]

  @property
  def first(self) -> str:
    """The name that is taken where none is given."""
    return next(iter(self.classes))

  def name_of(self, value: Any) -> str:
    """The name that chooses the class of `value`."""
    return next(name for name, cls in self.classes.items() if type(value) is cls)


def options(hint: Any) -> list[Any]:
  """What of a type a file can say: scalars, Literal, lists, mappings, dataclasses,
  np.dtype. Functions, meshes and arrays can come from Python alone and are left out."""
  members = _members(hint)
  if np.dtype in members:  # jax.typing.DTypeLike is a union of text, types and more
    return [np.dtype, *(m for m in members if m is type(None))]
  return [m for m in members if _is_plain(m)]


def section_of(hint: Any) -> type | Choice | None:
  """The dataclass that a field holds, or the choice of one; None: it holds a value."""
  if typing.get_origin(hint) is typing.Annotated:
    marks = typing.get_args(hint)[1:]
    return next((mark for mark in marks if isinstance(mark, Choice)), None)
  return next((m for m in _members(hint) if _is_section(m)), None)


def is_open(hint: Any) -> bool:
  """Whether a field is a mapping whose keys are not listed anywhere."""
  return any(typing.get_origin(option) in _MAPPINGS for option in options(hint))


def takes_null(hint: Any) -> bool:
  """Whether null is a value of the field, and not just the absence of one."""
  return type(None) in options(hint)


def convert(value: Any, hint: Any, key: str) -> Any:
  """`value` as the type `hint`. Integers pass as floats; what was typed for a string
  passes as it is, although YAML reads "17" as a number.

  Raises:
    ValueError: another type; begins with `key`, and says what was found and expected.
  """
  plain_value = value.value if isinstance(value, Argument) else value
  for option in options(hint):
    done, result = _as(plain_value, option, key)
    if done:
      return result
  if isinstance(value, Argument) and str in options(hint):
    return value.text
  raise ValueError(f"{key} is {describe(plain_value)}, expected {describe_type(hint)}")


def plain(value: Any) -> Any:
  """A value as YAML and JSON have it."""
  if isinstance(value, Mapping):
    return {key: plain(entry) for key, entry in value.items()}
  if isinstance(value, list | tuple):
    return [plain(entry) for entry in value]
  if isinstance(value, np.dtype | type):
    return jnp.dtype(value).name
  return value


def describe(value: Any) -> str:
  """A value with its type, for messages."""
  if value is None:
    return "null"
  if isinstance(value, bool):
    return "true" if value else "false"
  names = {int: "number", float: "number", str: "text", list: "list", dict: "mapping"}
  return f"the {names.get(type(value), type(value).__name__)} {value!r}"


def describe_type(hint: Any) -> str:
  """What a field expects, in words."""
  return " or ".join(_name(option) for option in options(hint))


def json_type(hint: Any) -> dict[str, Any]:
  """The JSON Schema of a value."""
  schemas = [_json_type(option) for option in options(hint)]
  return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _members(hint: Any) -> list[Any]:
  if typing.get_origin(hint) is typing.Annotated:
    return _members(typing.get_args(hint)[0])
  if typing.get_origin(hint) in (typing.Union, types.UnionType):
    return list(typing.get_args(hint))
  return [hint]


def _is_section(option: Any) -> bool:
  return isinstance(option, type) and dataclasses.is_dataclass(option)


def _is_plain(option: Any) -> bool:
  origin = typing.get_origin(option)
  if origin in _LISTS or origin in _MAPPINGS or origin is Literal:
    return True
  return option in _SCALARS or _is_section(option)


def _as(value: Any, option: Any, key: str) -> tuple[bool, Any]:
  """(whether the value is of this type, the value)."""
  origin = typing.get_origin(option)
  if origin is Literal:
    return isinstance(value, str) and value in typing.get_args(option), value
  if option is np.dtype:
    known = isinstance(value, str) and value in DTYPES
    # As Python code writes it, so that a value read back equals the default.
    return known, getattr(jnp, value) if known else None
  if origin in _LISTS:
    kind = typing.get_args(option)[0]
    entries = value if isinstance(value, list | tuple) else [None]
    parts = [_as(entry, kind, key) for entry in entries]
    return all(done for done, _ in parts), tuple(entry for _, entry in parts)
  if origin in _MAPPINGS:
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


def _name(option: Any) -> str:
  origin = typing.get_origin(option)
  if origin is Literal:
    return "one of " + ", ".join(typing.get_args(option))
  if option is np.dtype:
    return "one of " + ", ".join(DTYPES)
  if origin in _LISTS:
    numbers = typing.get_args(option)[0] in (int, float)
    return "a list of numbers" if numbers else "a list of names"
  return _SCALARS.get(option, "a mapping of names")


def _json_type(option: Any) -> dict[str, Any]:
  origin = typing.get_origin(option)
  if origin is Literal:
    return {"enum": list(typing.get_args(option))}
  if option is np.dtype:
    return {"enum": list(DTYPES)}
  if origin in _LISTS:
    return {"type": "array", "items": json_type(typing.get_args(option)[0])}
  if origin in _MAPPINGS:
    return {"type": "object"}
  names = {str: "string", bool: "boolean", int: "integer", float: "number"}
  return {"type": names.get(option, "null")}
