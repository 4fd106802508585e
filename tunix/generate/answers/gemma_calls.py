"""Tool calls of Gemma 4.

    <|tool_call>call:add{a:3,unit:<|"|>kg<|"|>,more:[1,{x:null}]}<tool_call|>

Each call has marks of its own. Keys have no quotes, and texts stand between two marks
without escapes. The closing mark may be missing at the end of an answer.
"""

from __future__ import annotations

import json
import re

from tunix.generate.answers.call_json import Calls, json_object
from tunix.generate.answers.marked_calls import Marks

GEMMA_CALL, GEMMA_END, GEMMA_QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
GEMMA_MARKS = (GEMMA_CALL, GEMMA_END, GEMMA_QUOTE)

_CALL = re.compile(r"\s*call:([\w.\-]+)\s*(\{.*\})\s*", re.DOTALL)
# A key follows a brace or a comma. A string of JSON cannot stand there: the strings of
# a call are cut out before.
_KEY = re.compile(r'([{,]\s*)([^\s{}\[\],:"]+)(\s*:)')


def _read(body: str) -> tuple[Calls, str] | None:
  """Returns name and arguments of the call; None if it is unreadable."""
  call = _CALL.fullmatch(body)
  arguments = json_object(_as_json(call[2])) if call else None
  return None if call is None or arguments is None else ([(call[1], arguments)], "")


def _as_json(text: str) -> str:
  """Returns the arguments with quotes around keys and texts."""
  # Every second part is a text. Of an odd number of marks the last one has no partner.
  parts = text.split(GEMMA_QUOTE)
  if len(parts) % 2 == 0:
    return ""  # no JSON: a text has no end
  parts[::2] = (_KEY.sub(_quoted, part) for part in parts[::2])
  parts[1::2] = (json.dumps(part) for part in parts[1::2])
  return "".join(parts)


def _quoted(key: re.Match[str]) -> str:
  return key[1] + json.dumps(key[2]) + key[3]


GEMMA = Marks(
  *(GEMMA_CALL, GEMMA_END, _read),
  is_open=lambda body: body.count(GEMMA_QUOTE) % 2 == 1,
)
