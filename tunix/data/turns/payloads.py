"""The payload of a message: its content, its thinking and its tool calls."""

from __future__ import annotations

import re
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
  function = _function(call)
  if function is not call:
    return {**call, "function": _with_arguments(function, text)}
  is_text = isinstance(call.get("arguments"), str)
  return {**call, "arguments": text if is_text else {text: text}}


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
  """Returns the object with the name and the arguments of a call."""
  return call["function"] if isinstance(call.get("function"), Mapping) else call


def missing(message: Message, text: str) -> str:
  """Returns what the text of a turn lacks: "content", "tool calls" or "" for nothing.

  A template may print content and thinking in another form, so that any text counts as
  content. The name of each tool call must be there, as a word.
  """
  calls = map(_function, message.get("tool_calls") or [])
  names = [str(call.get("name", "")) for call in calls]
  for name in set(names):
    printed = re.findall(rf"(?<!\w){re.escape(name)}(?!\w)", text)
    if len(printed) < names.count(name):
      return "tool calls"
  has_content = bool((message.get("content") or "").strip())
  return "content" if has_content and not text else ""
