"""The payload of a message: its content, its thinking and its tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Message = Mapping[str, Any]

# Private-use characters of Unicode, which do not occur in training text. The two
# placeholders differ in their first and in their last character, so that the common
# prefix and suffix of two renderings end exactly at the content.
PLACEHOLDERS = ("\ue000\ue001", "\ue002\ue003")

# Keys of a message that hold thinking, in the order in which templates look for them.
THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")


def replaced(message: Message, text: str) -> dict[str, Any]:
  """Replaces content, thinking and the arguments of tool calls by a placeholder.

  A turn with tool calls and without content gets no content, because templates may
  print or refuse a content next to calls.
  """
  keys = [key for key in THOUGHT_KEYS if isinstance(message.get(key), str)]
  calls = message.get("tool_calls")
  if not calls:
    return {**message, **dict.fromkeys([*keys, "content"], text)}
  keys = [key for key in (*keys, "content") if message.get(key)]
  changed = [_with_arguments(call, text) for call in calls]
  return {**message, **dict.fromkeys(keys, text), "tool_calls": changed}


def _with_arguments(call: Mapping[str, Any], text: str) -> dict[str, Any]:
  """Replaces the arguments of a call, JSON in a string or a dict, by a placeholder."""
  if isinstance(call.get("function"), Mapping):
    return {**call, "function": _with_arguments(call["function"], text)}
  is_text = isinstance(call.get("arguments"), str)
  return {**call, "arguments": text if is_text else {text: text}}


def described(message: Message) -> str:
  """Returns what a template should print of a turn, in words; "" for an empty turn."""
  has_text = isinstance(message.get("content"), str) and message["content"].strip()
  names = ["content"] * bool(has_text) + ["tool calls"] * bool(
    message.get("tool_calls")
  )
  return " and ".join(names)
