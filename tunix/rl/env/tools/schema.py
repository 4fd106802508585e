"""JSON schemas of functions, from type hints and docstrings in Google's style.

The schemas have the form of `transformers.utils.get_json_schema`, key for key, because
chat templates print them: a model then sees the tools as it did in its training.
"""

from __future__ import annotations

import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from tunix.rl.env.tools.results import ToolResult

Schema = dict[str, Any]

_BASIC = {str: "string", int: "integer", float: "number", bool: "boolean"}
_BASIC |= {list: "array", tuple: "array", dict: "object", type(None): "null"}
_HEADER = re.compile(r"^(Args|Returns|Raises):\s*$")
_ARGUMENT = re.compile(r"^(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
_CHOICES = re.compile(r"\(choices:\s*(\[.*\])\s*\)\s*$", re.I)


def function_schema(function: Callable[..., Any]) -> Schema:
  """Returns the schema of a function as a tool.

  Args:
    function: a function or method. Each argument needs a type hint and a line in the
      section "Args:" of the docstring. `(choices: ["a", "b"])` at the end of the line
      gives the values of the argument.

  Returns:
    {"type": "function", "function": {"name", "description", "parameters", "return"}}.
    "return" is missing if the function has no type hint for it.

  Raises:
    ValueError: a type hint or a description is missing, or a type has no schema.
  """
  name = getattr(function, "__name__", type(function).__name__)
  hints = _hints(function, name)
  description, arguments, returns = _docstring(function, name)
  properties, required = {}, []
  for parameter in inspect.signature(function).parameters.values():
    argument = f"argument {parameter.name!r} of the tool {name!r}"
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
      raise ValueError(
        f"{argument} is {parameter.kind.description}; name each argument"
      )
    if parameter.name not in hints:
      raise ValueError(f"{argument} has no type hint; add one")
    if parameter.name not in arguments:
      raise ValueError(
        f"{argument} has no description; add a line to the section 'Args:' of the "
        "docstring"
      )
    properties[parameter.name] = {
      **_schema_of(hints[parameter.name], argument),
      **_described(arguments[parameter.name], argument),
    }
    if parameter.default is parameter.empty:
      required.append(parameter.name)
  parameters: Schema = {"type": "object", "properties": properties}
  parameters |= {"required": required} if required else {}
  out = {"name": name, "description": description, "parameters": parameters}
  if "return" in hints:
    out["return"] = _schema_of(hints["return"], f"the result of the tool {name!r}")
    out["return"] |= {"description": returns} if returns else {}
  return {"type": "function", "function": out}


def checked_form(schema: Schema) -> Schema:
  """Returns a schema of draft 2020-12 that accepts the values of a tool's argument.

  `nullable`, which chat templates expect, is no keyword of JSON Schema.
  """
  out: Schema = {
    k: v for k, v in schema.items() if k not in ("nullable", "description")
  }
  for key in ("items", "additionalProperties"):
    if isinstance(out.get(key), Mapping):
      out[key] = checked_form(out[key])
  for key in ("anyOf", "prefixItems"):
    if key in out:
      out[key] = [checked_form(x) for x in out[key]]
  if "prefixItems" in out:
    count = len(out["prefixItems"])
    out |= {"minItems": count, "maxItems": count}
  return {"anyOf": [out, {"type": "null"}]} if schema.get("nullable") else out


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
  try:
    return typing.get_type_hints(function)
  except (NameError, TypeError) as error:
    raise ValueError(f"a type hint of the tool {name!r} is unknown: {error}") from error


def _schema_of(hint: object, what: str) -> Schema:
  """Returns the schema of a type.

  Raises:
    ValueError: the type has none.
  """
  origin, inner = typing.get_origin(hint), typing.get_args(hint)
  if hint is Any:
    return {}
  if hint is ToolResult:
    return {"type": "string"}
  if hint in _BASIC:
    return {"type": _BASIC[hint]}
  if isinstance(hint, type) and issubclass(hint, enum.Enum):
    return _choice([x.value for x in hint])
  if origin is typing.Literal:
    return _choice(list(inner))
  if origin in (typing.Union, types.UnionType):
    return _union(inner, what)
  if origin is list:
    return {"type": "array", "items": _schema_of(inner[0], what)}
  if origin is dict:
    return {"type": "object", "additionalProperties": _schema_of(inner[1], what)}
  if origin is tuple and inner[-1] is Ellipsis:
    return {"type": "array", "items": _schema_of(inner[0], what)}
  if origin is tuple:
    return {"type": "array", "prefixItems": [_schema_of(x, what) for x in inner]}
  raise ValueError(
    f"{what} has the type {hint!r}; expected str, int, float, bool, None, Any, "
    "an Enum, Literal, or list, dict, tuple and unions of them"
  )


def _choice(values: list[Any]) -> Schema:
  kinds = list(dict.fromkeys(_BASIC.get(type(x), "string") for x in values))
  return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}


def _union(members: tuple[Any, ...], what: str) -> Schema:
  schemas = [_schema_of(x, what) for x in members if x is not type(None)]
  if len(schemas) == 1:
    out = schemas[0]
  elif all(set(x) == {"type"} and isinstance(x["type"], str) for x in schemas):
    out = {"type": sorted(x["type"] for x in schemas)}
  else:
    out = {"anyOf": schemas}
  return out | ({"nullable": True} if type(None) in members else {})


def _described(text: str, what: str) -> Schema:
  """Returns the description of an argument, and its values if it names them."""
  choices = _CHOICES.search(text)
  if choices is None:
    return {"description": text}
  try:
    values = json.loads(choices[1])
  except ValueError as error:
    raise ValueError(
      f"the choices of {what} are {choices[1]}; expected a JSON list"
    ) from error
  return {"enum": values, "description": text[: choices.start()].strip()}


def _docstring(
  function: Callable[..., Any], name: str
) -> tuple[str, dict[str, str], str]:
  """Returns the description, the description by argument, and that of the result.

  Raises:
    ValueError: there is no docstring.
  """
  text = inspect.getdoc(function)
  if not text:
    raise ValueError(f"the tool {name!r} has no docstring; describe it for the model")
  sections: dict[str, list[str]] = {"": []}
  current = sections[""]
  for line in text.split("\n"):
    header = _HEADER.match(line)
    if header:
      current = sections.setdefault(header[1], [])
    else:
      current.append(line)
  description, returns = (
    "\n".join(sections.get(key, [])).strip() for key in ("", "Returns")
  )
  return description, _arguments(sections.get("Args", [])), returns


def _arguments(lines: list[str]) -> dict[str, str]:
  """Returns the texts of a section "Args:" by name, each in one line."""
  lines = [x for x in lines if x.strip()]
  arguments: dict[str, str] = {}
  indent = min((len(x) - len(x.lstrip()) for x in lines), default=0)
  name = ""
  for line in lines:
    entry = _ARGUMENT.match(line.strip())
    if entry and len(line) - len(line.lstrip()) == indent:
      name = entry[1]
      arguments[name] = entry[2].strip()
    elif name:
      arguments[name] = f"{arguments[name]} {line.strip()}".strip()
  return arguments
