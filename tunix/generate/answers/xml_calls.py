"""Tool calls of Qwen3-Coder, Qwen3.5, Nemotron 3, GLM-4.5, GLM-4.7 and DeepSeek-V3.

The parts of a call stand between tags:

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
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from tunix.generate.answers.call_json import Calls, json_object, read_json
from tunix.generate.answers.marked_calls import (
  CLOSE_CALL,
  OPEN_CALL,
  MarkedReader,
  Marks,
)

QWEN_FUNCTION, GLM_KEY = "<function=", "<arg_key>"
QWEN_MARKS = (OPEN_CALL, CLOSE_CALL)
GLM_MARKS = (*QWEN_MARKS, GLM_KEY, "</arg_key>", "<arg_value>", "</arg_value>")


def _special(words: str) -> str:
  """Returns a special token of DeepSeek, which has bars and blocks of its own."""
  return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


DEEPSEEK_CALLS, DEEPSEEK_END = _special("tool calls begin"), _special("tool calls end")
_DEEPSEEK_OPEN, _DEEPSEEK_CLOSE = _special("tool call begin"), _special("tool call end")
_DEEPSEEK_NAME = _special("tool sep")
DEEPSEEK_MARKS = (
  *(DEEPSEEK_CALLS, DEEPSEEK_END, _DEEPSEEK_OPEN, _DEEPSEEK_CLOSE, _DEEPSEEK_NAME),
)

_FUNCTION, _FUNCTION_END = re.compile(r"\s*<function=([^<>\s]+)>\s*"), "</function>"
# A value holds no other opening tag: its closing tag is missing then, and it would
# take in the next parameter or call.
_PARAMETER = re.compile(
  r"\s*<parameter=([^<>\s]+)>\n?((?:(?!<parameter=).)*?)\n?</parameter>\s*", re.DOTALL
)
_NAME = re.compile(r"\s*([^<>\s]+)\s*")
_PAIR = re.compile(
  r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>((?:(?!<arg_value>).)*?)</arg_value>\s*",
  re.DOTALL,
)
# V3 writes "function", the name and a fenced block; V3.1 the name and the object.
_DEEPSEEK_CALL = re.compile(
  rf"\s*{_DEEPSEEK_OPEN}(?:function{_DEEPSEEK_NAME}([^\n]+)\n```json\n(.*?)\n?```"
  rf"|([^\n<]+?){_DEEPSEEK_NAME}(.*?)){_DEEPSEEK_CLOSE}\s*",
  re.DOTALL,
)


def qwen3_coder_reader(tools: Collection[str]) -> MarkedReader:
  """Returns the reader of Qwen3-Coder, see `formats.Tools`.

  The models sometimes leave out <tool_call> before <function=name>.
  """

  def read(body: str) -> tuple[Calls, str] | None:
    name, texts, rest = _named_pairs(_FUNCTION, _PARAMETER, body)
    if not name or not rest.startswith(_FUNCTION_END):
      return None
    return [_call(name, texts, tools)], rest[len(_FUNCTION_END) :]

  def is_open(body):
    return body.count("<parameter=") > body.count("</parameter>")

  return MarkedReader(
    Marks(OPEN_CALL, CLOSE_CALL, read, is_open),
    Marks(QWEN_FUNCTION, CLOSE_CALL, lambda body: read(QWEN_FUNCTION + body), is_open),
  )


def glm4_reader(tools: Collection[str]) -> MarkedReader:
  """Returns the reader of GLM-4.5 and later, see `formats.Tools`."""

  def read(body: str) -> tuple[Calls, str] | None:
    name, texts, rest = _named_pairs(_NAME, _PAIR, body)
    return None if not name or rest else ([_call(name, texts, tools)], "")

  def is_open(body):
    return body.count("<arg_value>") > body.count("</arg_value>")

  return MarkedReader(Marks(OPEN_CALL, CLOSE_CALL, read, is_open))


def _deepseek_calls(body: str) -> tuple[Calls, str] | None:
  calls: Calls = []
  matches, rest = _in_order(_DEEPSEEK_CALL, body)
  for call in matches:
    name, arguments = call[1] or call[3], json_object(call[2] or call[4])
    if arguments is None:
      return None
    calls.append((name.strip(), arguments))
  return None if rest else (calls, "")


DEEPSEEK = Marks(DEEPSEEK_CALLS, DEEPSEEK_END, _deepseek_calls)  # V3 and V3.1


def _named_pairs(
  head: re.Pattern[str], pair: re.Pattern[str], body: str
) -> tuple[str | None, list[tuple[str, str]], str]:
  """Returns the name that a head has, the pairs after it, and the text after them."""
  start = head.match(body)
  if start is None:
    return None, [], body
  matches, rest = _in_order(pair, body[start.end() :])
  return start[1], [(match[1].strip(), match[2]) for match in matches], rest


def _in_order(pattern: re.Pattern[str], text: str) -> tuple[list[re.Match[str]], str]:
  """Returns the matches at the start of a text, one after the other, and the rest."""
  matches, at = [], 0
  while match := pattern.match(text, at):
    matches.append(match)
    at = match.end()
  return matches, text[at:]


def _call(
  name: str, texts: list[tuple[str, str]], tools: Collection[str]
) -> tuple[str, Mapping[str, Any]]:
  """Returns a call; the schema of the tool says what its texts stand for."""
  schema = tools.get(name) if isinstance(tools, Mapping) else None
  own = _mapping(_mapping(schema).get("properties"))
  return name, {key: _value(text, own.get(key), schema) for key, text in texts}


def _mapping(value: object) -> Mapping[str, Any]:
  """Returns an object of a foreign schema; an empty one for anything else."""
  return value if isinstance(value, Mapping) else {}


def _listed(value: object) -> list[Any]:
  """Returns a list of a foreign schema; an empty one for anything else."""
  return value if isinstance(value, list) else []


def _joined(
  schema: object, root: object, followed: set[str]
) -> Iterator[Mapping[str, Any]]:
  """Yields a schema and the schemas that it includes by `allOf` and local `$ref`.

  Args:
    schema: the schema.
    root: the schema that local references start from.
    followed: references that were followed, and are not followed again.
  """
  todo = [schema]
  while todo:
    part = _mapping(todo.pop())
    yield part
    todo += _listed(part.get("allOf"))
    reference = part.get("$ref")
    if isinstance(reference, str) and reference not in followed:
      followed.add(reference)
      target = root if reference.startswith("#") else None
      for key in reference.split("/")[1:]:
        target = _mapping(target).get(key.replace("~1", "/").replace("~0", "~"))
      todo.append(target)


def _types(
  schema: object, root: object, followed: set[str], depth: int = 0
) -> set[str]:
  """Returns the names of types that a JSON schema allows; none if it names none.

  See `_joined` for the arguments; `depth` is the number of alternatives around the
  schema. Those beyond 32 name no type.
  """
  types: set[str] = set()
  for part in _joined(schema, root, followed) if depth <= 32 else ():
    kind = part.get("type")
    own = {kind} if isinstance(kind, str) else set(map(str, _listed(kind)))
    own |= set(map(_type, _constants(part)))
    for option in _listed(part.get("anyOf") or part.get("oneOf")):
      own |= _types(option, root, followed, depth + 1)
    types = types & own or types | own
  return types


def _constants(schema: Mapping[str, Any]) -> list[Any]:
  """Returns the values that `enum` and `const` list."""
  return _listed(schema.get("enum")) + [
    schema[key] for key in ("const",) if key in schema
  ]


def _type(value: object) -> str:
  """Returns `string`, `null`, or `other` for a value of JSON."""
  return "null" if value is None else "string" if isinstance(value, str) else "other"


def _value(text: str, schema: object, root: object) -> Any:
  """Returns the value of an argument, which is its text if nothing else fits.

  If the schema allows a text, the text is taken as it is, except for null and for the
  other values that the schema lists. Without a type in the schema, a text that is a
  value of JSON or Python becomes this value.
  """
  types = _types(schema, root, set())
  if types == {"string"}:
    return text
  value = _parsed(text)
  is_null = value is None and text.strip() in ("null", "None")
  if "string" in types:
    values = [x for part in _joined(schema, root, set()) for x in _constants(part)]
    is_listed = value in values and text not in values
    return value if is_listed or (is_null and "null" in types) else text
  return value if value is not None or is_null else text


def _parsed(text: str) -> Any:
  """Returns the value of a text in JSON or in Python's syntax; None if it has none."""
  try:
    value, rest = read_json(text)
    if not rest.strip():
      return value
  except ValueError:
    pass
  # The text is the model's, and may be nested too deeply for the parser.
  try:
    value = ast.literal_eval(text.strip())
    json.dumps(value, allow_nan=False)  # sets, bytes and NaN are no JSON
    return value
  except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
    return None
