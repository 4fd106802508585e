"""Tool calls of Gemma 4.

    <|tool_call>call:add{a:3,unit:<|"|>kg<|"|>,more:[1,{x:null}]}<tool_call|>

Each call has marks of its own. Keys have no quotes, and texts stand between two marks
without escapes. The closing mark may be missing at the end of an answer.
"""

from __future__ import annotations

import json
import re

from tunix.generate.answers.json_calls import Calls, json_object
from tunix.generate.answers.marked_calls import MarkedReader, Marks

GEMMA_CALL, GEMMA_END, GEMMA_QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
GEMMA_MARKS = (GEMMA_CALL, GEMMA_END, GEMMA_QUOTE)

_CALL = re.compile(r"\s*call:([\w.\-]+)\s*(\{.*\})\s*", re.DOTALL)
# A key follows a brace or a comma. A string of JSON cannot stand there: the strings of
# a call are cut out before.
_KEY = re.compile(r'([{,]\s*)([^\s{}\[\],:"]+)(\s*:)')


def gemma4_reader() -> MarkedReader:
  """Returns the reader of Gemma 4's calls."""
  is_open = lambda body: body.count(GEMMA_QUOTE) % 2 == 1
  return MarkedReader(Marks(GEMMA_CALL, GEMMA_END, _read, is_open))


def _read(body: str) -> tuple[Calls, str] | None:
  """Returns name and arguments of the call; None if it is unreadable."""
  found = _CALL.fullmatch(body)
  arguments = json_object(_as_json(found[2])) if found else None
  return None if found is None or arguments is None else ([(found[1], arguments)], "")


def _as_json(text: str) -> str:
  """Returns the arguments with quotes around keys and texts."""
  # Every second part is a text. Of an odd number of marks the last one has no partner.
  parts = text.split(GEMMA_QUOTE)
  if len(parts) % 2 == 0:
    return ""  # no JSON: a text has no end
  parts[::2] = (_KEY.sub(_quoted, part) for part in parts[::2])
  parts[1::2] = (json.dumps(part) for part in parts[1::2])
  return "".join(parts)


def _quoted(found: re.Match[str]) -> str:
  return found[1] + json.dumps(found[2]) + found[3]
