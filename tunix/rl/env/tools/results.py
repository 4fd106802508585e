"""Answers of tools as text of bounded length."""

from __future__ import annotations

import dataclasses
import json

from tunix.sandbox.jail import JailResult
from tunix.utils import array_codec

MAX_CHARS = 8192
_MARK = "\n[{} characters left out]\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolResult:
  """The answer of a tool.

  Attributes:
    text: the text that the model reads.
    finish: "ok"; "malformed" (the call has wrong arguments or names no tool); "error"
      (the function raised); or the finish of a `JailResult`.
  """

  text: str
  finish: str = "ok"


def of_jail(result: JailResult) -> ToolResult:
  """Returns the answer of a tool that ran a command in a jail."""
  return ToolResult(text=result.text(), finish=result.finish)


def as_text(value: object) -> str:
  """Returns text as it is, and another value as JSON, or as Python shows it."""
  if isinstance(value, str):
    return value
  value = array_codec.as_python(value)
  try:
    return json.dumps(value, ensure_ascii=False)
  except (TypeError, ValueError, RecursionError):
    return str(value)


def bounded(text: str, max_chars: int) -> str:
  """Returns text of at most `max_chars` characters, without lone surrogates.

  A longer text keeps its begin and its end, with `[N characters left out]` between
  them.
  """
  text = text.encode("utf-8", "replace").decode()
  if len(text) <= max_chars:
    return text
  kept = max_chars - len(_MARK.format(len(text)))
  begin, end = kept - kept // 2, kept // 2
  return text[:begin] + _MARK.format(len(text) - kept) + text[len(text) - end :]
