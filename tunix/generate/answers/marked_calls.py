"""Tool calls of Qwen 2.5/3 (Hermes), Mistral, Granite 3, Phi 4 mini, OLMo 3, SmolLM3.

Calls stand between marks:

    <tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call> hermes, Qwen 2.5 and 3
    [TOOL_CALLS][{"name": "add", "arguments": {"a": 3}}]          mistral
    <|tool_call|>[{"name": "add", "arguments": {"a": 3}}]         granite
    functools[{"name": "add", "arguments": {"a": 3}}]             phi4_mini
    <function_calls>add(a=3)\nadd(a=4)</function_calls>           olmo3
    <code>add(a=3)\nprint(add(a=4))</code>                        smollm3_code

SmolLM3 writes the last one if its tools were given as `python_tools`. Other code
between these marks is no list of calls, and stays text.

Phi 4 mini writes calls as Granite 3 does, too. Newer models of Mistral write
[TOOL_CALLS]name[ARGS]{...} for each call, or name{...}, or have [CALL_ID]id before
[ARGS]. The closing mark may be missing at the end of an answer; `[TOOL_CALLS]` and
`functools[{` have none. Text after the calls stays text.
"""

from __future__ import annotations

import ast
import re
import secrets
import string
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tunix.generate.answers.call_json import (
  Calls,
  closing_mark,
  ends_in_text,
  json_calls,
  read_json,
  tool_call,
)
from tunix.generate.answers.pieces import Piece, held_back, new_call_id

OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
MISTRAL_CALLS = "[TOOL_CALLS]"
MISTRAL_MARKS = (MISTRAL_CALLS, "[CALL_ID]", "[ARGS]")
GRANITE_CALLS, GRANITE_END = "<|tool_call|>", "<|/tool_call|>"
PHI_TOOLS_END, PHI_CALLS = "<|/tool|>", "functools[{"
OLMO_CALLS, OLMO_END = "<function_calls>", "</function_calls>"
CODE, CODE_END = "<code>", "</code>"
# Unreadable blocks of an answer that are searched for a call inside. Each search reads
# the rest of the answer, which may be one mark over and over.
_MOST_SEARCHED = 100
# Values of JSON, which templates print among arguments in Python's syntax.
_JSON_NAMES = {"true": True, "false": False, "null": None}


class Marks(NamedTuple):
  """Marks around calls, and what reads the text between them.

  Attributes:
    opening: mark before the calls.
    closing: mark after them; None if they end with their last character.
    read: takes the text between the marks and returns the calls at its start and the
      text after them; None if it is unreadable.
    is_open: returns True if a text from the opening mark on ends inside a value, so
      that a closing mark there is a part of this value.
    new_id: returns the id of a call.
  """

  opening: str
  closing: str | None
  read: Callable[[str], tuple[Calls, str] | None]
  is_open: Callable[[str], bool] = ends_in_text
  new_id: Callable[[], str] = new_call_id


class MarkedReader:
  """Reads calls between marks. A block that cannot be read stays text."""

  def __init__(self, *marks: Marks):
    self._marks, self._text, self._searched = marks, "", 0

  def push(self, text: str) -> Piece:
    self._text += text
    piece = Piece()
    while (block := self._first()) is not None:
      before, marks, rest = block
      closings = re.finditer(re.escape(marks.closing), rest) if marks.closing else ()
      close = closing_mark(closings, rest, marks.is_open, marks.read)
      if close is None:
        return piece
      body, after = rest[: close.start()], rest[close.end() :]
      piece += self._block(before, marks, body, close[0], after)
    return piece + self._settled()

  def end(self) -> Piece:
    piece = Piece()
    while (block := self._first()) is not None:
      before, marks, body = block
      close = after = ""
      if marks.closing is not None and marks.read(body) is None:
        # A value without an end hides the closing mark.
        body, close, after = body.partition(marks.closing)
      piece += self._block(before, marks, body, close, after) + self.push("")
    text, self._text = self._text, ""
    return piece + Piece(content=text if text.strip() else "")

  def _first(self) -> tuple[str, Marks, str] | None:
    """Returns (text before, marks, text after) of the first opening mark."""
    places = [(self._text.find(x.opening), x) for x in self._marks]
    places = [(at, x) for at, x in places if at >= 0]
    if not places:
      return None
    at, marks = min(places, key=lambda pair: pair[0])
    return self._text[:at], marks, self._text[at + len(marks.opening) :]

  def _settled(self) -> Piece:
    held = max(held_back(self._text, marks.opening) for marks in self._marks)
    content = self._text[: len(self._text) - held].rstrip()
    self._text = self._text[len(content) :]
    return Piece(content=content)

  def _block(
    self, before: str, marks: Marks, body: str, close: str, after: str
  ) -> Piece:
    """Returns the calls of a block, or its text, and keeps the text after it."""
    pairs, rest = marks.read(body) or ([], "")
    calls = [tool_call(name, arguments, marks.new_id) for name, arguments in pairs]
    if not calls or None in calls:
      # The mark may stand in prose or lack its end, and a call may begin after it.
      starts = [at for x in self._marks if (at := body.find(x.opening)) >= 0]
      self._searched += bool(starts)
      is_searched = starts and self._searched <= _MOST_SEARCHED
      text = body[: min(starts)].rstrip() if is_searched else body + close
      self._text = (body + close)[len(text) :] + after
      content = f"{before}{marks.opening}{text}"
      return Piece(content=content, malformed=marks.opening)
    if marks.closing and not close:  # behind more marks than were looked at
      rest, close, after = rest.partition(marks.closing)
    if any(x.opening in rest for x in self._marks):  # no closing mark between calls
      rest += close
    self._text = (rest if rest.strip() else "") + after
    return Piece(content=before.rstrip(), calls=tuple(filter(None, calls)))


def _several(body: str) -> tuple[Calls, str] | None:
  """Reads values of JSON one after the other, which some models write in a block."""
  calls: Calls = []
  while block := json_calls(body):
    calls, body = calls + block[0], block[1]
  return (calls, body) if calls else None


_MISTRAL_CALL = re.compile(r"\s*([\w.\-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\])?")


def _mistral_call(body: str) -> tuple[Calls, str] | None:
  """Reads name[CALL_ID]id[ARGS]{...}; the id and both marks may be missing."""
  start = _MISTRAL_CALL.match(body)
  try:
    arguments, rest = read_json(body[start.end() :]) if start else (None, "")
  except ValueError:
    return None
  if start is None or not isinstance(arguments, dict):
    return None
  return [(start[1], arguments)], rest


def short_call_id() -> str:
  """Returns nine letters and digits; Mistral's templates refuse other ids."""
  letters = string.ascii_letters + string.digits
  return "".join(secrets.choice(letters) for _ in range(9))


def _ends_in_python_text(body: str) -> bool:
  """Returns True if Python's code ends inside a string."""
  try:
    ast.parse(body.strip())
  except SyntaxError as error:
    return error.msg.startswith("unterminated")
  except (ValueError, RecursionError, MemoryError):
    return False
  return False


def _python_calls(body: str, prints: bool = False) -> tuple[Calls, str] | None:
  """Reads calls with named arguments that are literals; runs nothing.

  Args:
    body: the calls, one to a line.
    prints: if True, `print(call)` stands for the call.
  """
  try:
    lines = ast.parse(body.strip()).body
    return [_python_call(_printed(line) if prints else line) for line in lines], ""
  # The text is the model's, and may be nested too deeply for the parser.
  except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
    return None


def _printed(line: ast.stmt) -> ast.stmt:
  """Returns what a line prints as a line, or the line itself."""
  match line:
    case ast.Expr(ast.Call(ast.Name("print"), [inner], [])):
      return ast.Expr(inner)
  return line


def _python_call(line: ast.stmt) -> tuple[str, Mapping[str, Any]]:
  call = line.value if isinstance(line, ast.Expr) else None
  if not isinstance(call, ast.Call) or call.args:
    raise ValueError("expected name(argument=value, ...)")
  arguments = {}
  for keyword in call.keywords:
    if keyword.arg is None:
      raise ValueError("expected named arguments")
    arguments[keyword.arg] = ast.literal_eval(_Json().visit(keyword.value))
  return ast.unparse(call.func), arguments


class _Json(ast.NodeTransformer):
  """Replaces `true`, `false` and `null` by their values."""

  def visit_Name(self, node: ast.Name) -> ast.AST:
    if node.id not in _JSON_NAMES:
      return node
    return ast.copy_location(ast.Constant(_JSON_NAMES[node.id]), node)


HERMES = Marks(OPEN_CALL, CLOSE_CALL, _several)
MISTRAL = Marks(
  *(MISTRAL_CALLS, None, lambda body: json_calls(body) or _mistral_call(body)),
  new_id=short_call_id,
)
GRANITE = Marks(GRANITE_CALLS, GRANITE_END, json_calls)
PHI = Marks(PHI_CALLS, None, lambda body: json_calls("[{" + body))
OLMO = Marks(OLMO_CALLS, OLMO_END, _python_calls, _ends_in_python_text)
SMOLLM3_CODE = Marks(
  *(CODE, CODE_END, lambda body: _python_calls(body, prints=True)),
  is_open=_ends_in_python_text,
)
