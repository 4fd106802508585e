"""Conversations and tools of a chat request, as chat templates expect them."""

from __future__ import annotations

from typing import Any

from tunix.generate.answers.call_json import object_of
from tunix.serve.http.errors import bad
from tunix.serve.http.fields import Fields, missing, shown

_ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(fields: Fields) -> list[dict[str, Any]]:
  """Takes `messages`, which `generate.tokenizer.messages` brings into one form later.

  Raises:
    ApiError: 400 for what no template can show.
  """
  messages = fields.raw("messages")
  if messages is None:
    raise missing("messages")
  if not isinstance(messages, list) or not messages:
    raise bad("messages", f"messages is {shown(messages)}, expected a list of messages")
  for i, message in enumerate(messages):
    _check_message(message, f"messages[{i}]")
  return messages


def _check_message(message: object, name: str) -> None:
  if not isinstance(message, dict):
    raise bad(name, f"{name} is {shown(message)}, expected an object")
  role = message.get("role")
  if role not in _ROLES:
    raise bad(f"{name}.role", f"{name}.role is {shown(role)}, expected one of {_ROLES}")
  calls = message.get("tool_calls")
  if calls is not None:
    _check_calls(calls, f"{name}.tool_calls")
  _check_content(message.get("content"), f"{name}.content")
  if message.get("content") is None and calls is None and role != "assistant":
    raise bad(f"{name}.content", f"{name}.content is missing")


def _check_content(content: object, name: str) -> None:
  if not isinstance(content, str | list | None):
    raise bad(name, f"{name} is {shown(content)}, expected a text or a list of parts")
  for i, part in enumerate(content if isinstance(content, list) else []):
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "image_url":
      continue  # read_images checks it
    if kind != "text" or not isinstance(part.get("text"), str):
      raise bad(
        f"{name}[{i}]",
        f"{name}[{i}] is {shown(part)}, expected a part of type text, or of type "
        "image_url for a model that reads images",
      )


def _check_calls(calls: object, name: str) -> None:
  if not isinstance(calls, list):
    raise bad(name, f"{name} is {shown(calls)}, expected a list of tool calls")
  for i, call in enumerate(calls):
    _check_call(call, f"{name}[{i}]")


def _check_call(call: object, name: str) -> None:
  function = call.get("function") if isinstance(call, dict) else None
  if not isinstance(function, dict) or not isinstance(function.get("name"), str):
    raise bad(name, f"{name} is {shown(call)}, expected a call of a function")
  arguments = function.get("arguments")
  if object_of(arguments) is None:
    name = f"{name}.function.arguments"
    raise bad(name, f"{name} is {shown(arguments)}, expected a JSON object as text")


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
