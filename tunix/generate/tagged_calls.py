"""Tool calls whose parts stand between tags: Qwen3-Coder, GLM-4.5 and DeepSeek-V3.

    <tool_call>                                               qwen3_coder, also Qwen3.5
    <function=add>                                            and Nemotron 3
    <parameter=a>
    3
    </parameter>
    </function>
    </tool_call>

    <tool_call>add                                            glm4, also GLM-4.7 Flash
    <arg_key>a</arg_key>
    <arg_value>3</arg_value>
    </tool_call>

DeepSeek-V3 (`deepseek_v3`) has special tokens around a name and its arguments in JSON.

The first two formats print a text without quotes, and other values in JSON or in
Python's syntax, so the schema of the tool says which of them a value is.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from tunix.generate.marked_calls import MarkedReader, Marks

OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
QWEN_FUNCTION, GLM_KEY = "<function=", "<arg_key>"


def _special(words: str) -> str:
  """Returns a special token of DeepSeek, which has bars and blocks of its own."""
  return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


DEEPSEEK_CALLS, DEEPSEEK_END = _special("tool calls begin"), _special("tool calls end")
_DEEPSEEK_OPEN, _DEEPSEEK_CLOSE = _special("tool call begin"), _special("tool call end")
_DEEPSEEK_NAME = _special("tool sep")
DEEPSEEK_MARKS = (
  *(DEEPSEEK_CALLS, DEEPSEEK_END, _DEEPSEEK_OPEN, _DEEPSEEK_CLOSE, _DEEPSEEK_NAME),
)

_FUNCTION = re.compile(r"\s*<function=([^<>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(
  r"\s*<parameter=([^<>\s]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL
)
_NAMED = re.compile(r"\s*([^<>\s]+)\s*(.*)", re.DOTALL)
_PAIR = re.compile(
  r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL
)
# V3 writes "function", the name and a fenced block; V3.1 the name and the object.
_DEEPSEEK_CALL = re.compile(
  rf"\s*{_DEEPSEEK_OPEN}(?:function{_DEEPSEEK_NAME}([^\n]+)\n```json\n(.*?)\n?```"
  rf"|([^\n<]+?){_DEEPSEEK_NAME}(.*?)){_DEEPSEEK_CLOSE}\s*",
  re.DOTALL,
)

_Calls = list[tuple[str, dict[str, Any]]]


def qwen3_coder_reader(tools: Collection[str]) -> MarkedReader:
  """Returns the reader of Qwen3-Coder, see `tool_calls.tool_reader`."""

  def read(body: str) -> _Calls | None:
    found = _FUNCTION.fullmatch(body)
    return found and _call(found[1], found[2], _PARAMETER, tools)

  return MarkedReader(Marks(OPEN_CALL, CLOSE_CALL, read))


def glm4_reader(tools: Collection[str]) -> MarkedReader:
  """Returns the reader of GLM-4.5 and later, see `tool_calls.tool_reader`."""

  def read(body: str) -> _Calls | None:
    found = _NAMED.fullmatch(body)
    return found and _call(found[1], found[2], _PAIR, tools)

  return MarkedReader(Marks(OPEN_CALL, CLOSE_CALL, read))


def deepseek_v3_reader() -> MarkedReader:
  """Returns the reader of DeepSeek-V3 and V3.1."""
  return MarkedReader(Marks(DEEPSEEK_CALLS, DEEPSEEK_END, _deepseek_calls))


def _deepseek_calls(body: str) -> _Calls | None:
  calls: _Calls = []
  for found in _in_order(_DEEPSEEK_CALL, body) or ():
    name, arguments = found[1] or found[3], _parsed(found[2] or found[4])
    if not isinstance(arguments, dict):
      return None
    calls.append((name.strip(), arguments))
  return calls or None


def _call(
  name: str, body: str, pattern: re.Pattern[str], tools: Collection[str]
) -> _Calls | None:
  """Returns the call whose arguments are (name, value) matches of a pattern."""
  matches = _in_order(pattern, body)
  if matches is None:
    return None
  schemas = _properties(tools.get(name) if isinstance(tools, Mapping) else None)
  texts = [(found[1].strip(), found[2]) for found in matches]
  return [(name, {key: _value(text, schemas.get(key)) for key, text in texts})]


def _in_order(pattern: re.Pattern[str], text: str) -> list[re.Match[str]] | None:
  """Returns the matches that make up a text; None if there is something else in it."""
  matches, at = [], 0
  text = text.strip()
  while at < len(text):
    found = pattern.match(text, at)
    if found is None:
      return None
    matches.append(found)
    at = found.end()
  return matches


def _properties(schema: Any) -> Mapping[str, Any]:
  found = schema.get("properties") if isinstance(schema, Mapping) else None
  return found if isinstance(found, Mapping) else {}


def _types(schema: Any) -> set[str]:
  """Returns the names of types that a JSON schema allows; none if it names none."""
  if not isinstance(schema, Mapping):
    return set()
  named, options = schema.get("type"), schema.get("anyOf") or schema.get("oneOf")
  types = {named} if isinstance(named, str) else set(map(str, _listed(named)))
  return types.union(*map(_types, _listed(options)))


def _listed(value: Any) -> list[Any]:
  """Returns a list of a foreign schema; an empty one for anything else."""
  return value if isinstance(value, list) else []


def _value(text: str, schema: Any) -> Any:
  """Returns the value of an argument, which is its text if nothing else fits.

  If the schema allows a text, the text is taken as it is, except for null. Without a
  type in the schema, a text that is a value of JSON or Python becomes this value.
  """
  types = _types(schema)
  if types == {"string"}:
    return text
  value = _parsed(text)
  if "string" in types:
    return None if text.strip() in ("null", "None") and "null" in types else text
  is_null = value is None and text.strip() in ("null", "None")
  return value if value is not None or is_null else text


def _parsed(text: str) -> Any:
  """Returns the value of a text in JSON or in Python's syntax; None if it has none."""
  for parse in (json.loads, ast.literal_eval):
    try:
      value = parse(text.strip())
      json.dumps(value, allow_nan=False)  # sets, bytes and NaN are no JSON
      return value
    # The text is the model's, and may be nested too deeply for the parser.
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
      continue
  return None
