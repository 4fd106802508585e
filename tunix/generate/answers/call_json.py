"""JSON in tool calls of Qwen (Hermes), Llama 3, Mistral, gpt-oss and other families.

Models write raw line breaks inside texts, and go on after a value. NaN and numbers
beyond the range of a double are no JSON.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from tunix.generate.answers.pieces import ToolCall, new_call_id

# (name, arguments) of each call
Calls = list[tuple[str, Mapping[str, Any]]]

# At most this many marks are looked at inside one text of a call, because each look
# reads the call from its start. With more of them, a call of hermes, granite, harmony
# or qwen3_coder is read at the end of the answer; one of another format stays text.
_MOST_INSIDE = 16


def _finite(text: str) -> float:
  value = float(text)
  if not math.isfinite(value):
    raise ValueError(f"the number {text} is beyond the range of a double")
  return value


def _no_constant(name: str) -> None:
  raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(
  strict=False, parse_float=_finite, parse_constant=_no_constant
)
_OPEN_VALUE = re.compile(r"[\[{]")


def read_json(text: str) -> tuple[Any, str]:
  """Returns the JSON value at the start of a text, and the text after it.

  Raises:
    ValueError: the text does not begin with a value, or it is nested too deeply.
  """
  text = text.lstrip()
  try:
    value, end = _DECODER.raw_decode(text)
  except RecursionError as error:
    raise ValueError("the value is nested too deeply") from error
  return value, text[end:]


def ends_in_text(text: str) -> bool:
  """Returns True if the last JSON object or list of a text ends inside a string."""
  while opening := _OPEN_VALUE.search(text):
    try:
      _, text = read_json(text[opening.start() :])
    except json.JSONDecodeError as error:
      return error.msg.startswith("Unterminated string")
    except ValueError:
      return False
  return False


def closing_mark(
  marks: Iterable[re.Match[str]],
  text: str,
  is_open: Callable[[str], bool],
  read: Callable[[str], Any],
) -> re.Match[str] | None:
  """Returns the mark that closes a call; None if more text is needed.

  A mark inside a value of the call is a part of this value. If a value has no end, the
  first mark closes the call, so that calls after it are found.

  Args:
    marks: closing marks in the text, in order.
    text: the text of a call and what follows.
    is_open: returns True if the text of a call ends inside a value.
    read: returns None for the text of a call that is unreadable.
  """
  first = None
  for mark in islice(marks, _MOST_INSIDE):
    first, body = first or mark, text[: mark.start()]
    if not is_open(body):
      return mark if mark is first or read(body) is not None else first
  return None


def json_calls(text: str) -> tuple[Calls, str] | None:
  """Reads {"name": ..., "arguments": {...}}, or a list of such objects.

  Returns:
    The calls and the text after them; None if the text begins with something else.
  """
  try:
    value, rest = read_json(text)
    return list(map(_named, value if isinstance(value, list) else [value])), rest
  except ValueError:
    return None


def _named(value: object) -> tuple[str, Mapping[str, Any]]:
  if not isinstance(value, dict) or not isinstance(value.get("name"), str):
    raise ValueError("expected an object with the name of a tool")
  arguments = object_of(value.get("arguments", value.get("parameters")))
  if arguments is None:
    raise ValueError("expected an object of arguments")
  return value["name"], arguments


def json_object(text: str) -> dict[str, Any] | None:
  """Returns the JSON object that a text is; None if it is none."""
  try:
    value, rest = read_json(text)
  except ValueError:
    return None
  return value if isinstance(value, dict) and not rest.strip() else None


def object_of(arguments: object) -> Mapping[str, Any] | None:
  """Returns the arguments of a call as an object; None if they are not one.

  Blank text and null stand for no arguments.
  """
  if isinstance(arguments, str) and arguments.strip() not in ("", "null"):
    return json_object(arguments)
  if arguments is None or isinstance(arguments, str):
    return {}
  return arguments if isinstance(arguments, Mapping) else None


def tool_call(
  name: str, arguments: object, new_id: Callable[[], str] = new_call_id
) -> ToolCall | None:
  """Returns a call; None if JSON cannot express its arguments.

  A half of a surrogate pair, which UTF-8 cannot express, becomes U+FFFD.
  """
  try:
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
  except (ValueError, TypeError, RecursionError):
    return None
  return ToolCall(id=new_id(), name=_whole(name), arguments=_whole(text))


def _whole(text: str) -> str:
  """Joins halves of surrogate pairs; a half that is alone becomes U+FFFD."""
  return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
