"""Conversations and tools of a chat request, as chat templates expect them."""

from __future__ import annotations

import json
from typing import Any

from tunix.serve.errors import ApiError, bad
from tunix.serve.fields import Fields, missing, shown

_ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(fields: Fields) -> list[dict[str, Any]]:
  """Takes `messages`.

  Parts of text are joined by line breaks, arguments of tool calls become objects, and
  the role "developer" becomes "system", as templates expect.

  Raises:
    ApiError: 400 for what no template can show.
  """
  messages = fields.raw("messages")
  if messages is None:
    raise missing("messages")
  if not isinstance(messages, list) or not messages:
    raise bad("messages", f"messages is {shown(messages)}, expected a list of messages")
  return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, name: str) -> dict[str, Any]:
  if not isinstance(message, dict):
    raise bad(name, f"{name} is {shown(message)}, expected an object")
  role = message.get("role")
  if role not in _ROLES:
    raise bad(f"{name}.role", f"{name}.role is {shown(role)}, expected one of {_ROLES}")
  out = {**message, "role": "system" if role == "developer" else role}
  out["content"] = _content(message.get("content"), f"{name}.content")
  calls = message.get("tool_calls")
  if calls is not None:
    out["tool_calls"] = _calls(calls, f"{name}.tool_calls")
  elif out["content"] is None and role != "assistant":
    raise bad(f"{name}.content", f"{name}.content is missing")
  # Templates join texts, and none of them reads null.
  out["content"] = "" if out["content"] is None else out["content"]
  return out


def _content(content: Any, name: str) -> str | None:
  if content is None or isinstance(content, str):
    return content
  if not isinstance(content, list):
    raise bad(name, f"{name} is {shown(content)}, expected a text or a list of parts")
  texts = []
  for i, part in enumerate(content):
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(part.get("text"), str):
      raise bad(
        f"{name}[{i}]",
        f"{name}[{i}] is {shown(part)}, expected a part of type text: this model reads "
        "text only",
      )
    texts.append(part["text"])
  return "\n".join(texts)


def _calls(calls: Any, name: str) -> list[dict[str, Any]]:
  if not isinstance(calls, list):
    raise bad(name, f"{name} is {shown(calls)}, expected a list of tool calls")
  return [_tool_call(call, f"{name}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, name: str) -> dict[str, Any]:
  function = call.get("function") if isinstance(call, dict) else None
  if not isinstance(function, dict) or not isinstance(function.get("name"), str):
    raise bad(name, f"{name} is {shown(call)}, expected a call of a function")
  arguments = function.get("arguments")
  if isinstance(arguments, str):
    arguments = _arguments(arguments, f"{name}.function.arguments")
  if arguments is not None and not isinstance(arguments, dict):
    raise _no_object(f"{name}.function.arguments", arguments)
  return {**call, "function": {**function, "arguments": arguments or {}}}


def _arguments(text: str, name: str) -> Any:
  if not text.strip():
    return {}
  try:
    return json.loads(text)
  except (ValueError, RecursionError) as error:
    raise _no_object(name, text) from error


def _no_object(name: str, value: Any) -> ApiError:
  return bad(name, f"{name} is {shown(value)}, expected a JSON object as text")


def read_tools(fields: Fields) -> list[dict[str, Any]]:
  """Takes `tools` and `tool_choice`; with the choice "none" there are no tools.

  Raises:
    ApiError: 400 for a malformed tool, or a choice that cannot be enforced.
  """
  tools, choice = fields.raw("tools", []), fields.raw("tool_choice", "auto")
  fields.neutral(parallel_tool_calls=(True,))
  if not isinstance(tools, list):
    raise bad("tools", f"tools is {shown(tools)}, expected a list of functions")
  for i, tool in enumerate(tools):
    function = tool.get("function") if isinstance(tool, dict) else None
    named = isinstance(function, dict) and isinstance(function.get("name"), str)
    if not named or tool.get("type") != "function":
      raise bad(
        f"tools[{i}]",
        f"tools[{i}] is {shown(tool)}, expected an object with type function and a "
        "function that has a name",
      )
  if choice not in ("auto", "none"):
    raise bad(
      "tool_choice",
      f"tool_choice is {shown(choice)}, expected auto or none: this server cannot "
      "force a call. Ask for the call in a message",
      "unsupported_parameter",
    )
  return tools if choice == "auto" else []
