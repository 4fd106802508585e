"""Tool calls between two marks: Granite 3, Phi 4 mini, OLMo 3 and SmolLM3.

    <|tool_call|>[{"name": "add", "arguments": {"a": 3}}]         granite
    functools[{"name": "add", "arguments": {"a": 3}}]             phi4_mini
    <function_calls>add(a=3)\nadd(a=4)</function_calls>           olmo3
    <code>add(a=3)\nprint(add(a=4))</code>                        smollm3_code

SmolLM3 writes the last one if its tools were given as `python_tools`. Other code
between these marks is no list of calls, and stays text.

Phi 4 mini writes calls as Granite 3 does, too. The closing mark may be missing at the
end of an answer; `functools[{` has none, so its calls end the answer.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from tunix.generate.answer_pieces import Piece, ToolCall, held_back, new_call_id

GRANITE_CALLS, GRANITE_END = "<|tool_call|>", "<|/tool_call|>"
PHI_TOOLS_END, PHI_CALLS = "<|/tool|>", "functools[{"
OLMO_CALLS, OLMO_END = "<function_calls>", "</function_calls>"
CODE, CODE_END = "<code>", "</code>"
# Values of JSON, which templates print among arguments in Python's syntax.
_JSON_NAMES = {"true": True, "false": False, "null": None}

# body -> (name, arguments) of its calls; None if it is unreadable
_Read = Callable[[str], list[tuple[str, dict[str, Any]]] | None]


class Marks(NamedTuple):
  """Marks around calls, and what reads the text between them.

  Attributes:
    opening: mark before the calls.
    closing: mark after them; None if they end the answer.
    read: reads the text between the marks.
  """

  opening: str
  closing: str | None
  read: _Read


class MarkedReader:
  """Reads calls between marks. A block that cannot be read stays text."""

  def __init__(self, *marks: Marks):
    self._marks, self._text = marks, ""

  def push(self, text: str) -> Piece:
    self._text += text
    piece = Piece()
    while (found := self._first()) is not None:
      before, marks, rest = found
      if marks.closing is None or marks.closing not in rest:
        return piece
      body, close, self._text = rest.partition(marks.closing)
      piece += self._block(before, marks, body, close)
    return piece + self._settled()

  def end(self) -> Piece:
    found, text = self._first(), self._text
    self._text = ""
    if found is None:
      return Piece(content=text if text.strip() else "")
    before, marks, body = found
    return self._block(before, marks, body, "")

  def _first(self) -> tuple[str, Marks, str] | None:
    """Returns (text before, marks, text after) of the first opening mark."""
    found = [(self._text.find(x.opening), x) for x in self._marks]
    found = [(at, x) for at, x in found if at >= 0]
    if not found:
      return None
    at, marks = min(found, key=lambda pair: pair[0])
    return self._text[:at], marks, self._text[at + len(marks.opening) :]

  def _settled(self) -> Piece:
    held = max(held_back(self._text, marks.opening) for marks in self._marks)
    shown = self._text[: len(self._text) - held].rstrip()
    self._text = self._text[len(shown) :]
    return Piece(content=shown)

  @staticmethod
  def _block(before: str, marks: Marks, body: str, close: str) -> Piece:
    found = marks.read(body)
    if not found:
      return Piece(content=f"{before}{marks.opening}{body}{close}")
    calls = [
      ToolCall(id=new_call_id(), name=name, arguments=json.dumps(x, ensure_ascii=False))
      for name, x in found
    ]
    return Piece(content=before.rstrip(), calls=tuple(calls))


def granite_reader() -> MarkedReader:
  """Returns the reader of Granite 3, whose calls are a list in JSON."""
  return MarkedReader(Marks(GRANITE_CALLS, GRANITE_END, _listed))


def phi4_mini_reader() -> MarkedReader:
  """Returns the reader of Phi 4 mini, whose calls are a list in JSON."""
  return MarkedReader(
    Marks(GRANITE_CALLS, GRANITE_END, _listed),
    Marks(PHI_CALLS, None, lambda body: _listed("[{" + body)),
  )


def olmo3_reader() -> MarkedReader:
  """Returns the reader of OLMo 3, whose calls are lines in Python's syntax."""
  return MarkedReader(Marks(OLMO_CALLS, OLMO_END, _python_calls))


def smollm3_code_reader() -> MarkedReader:
  """Returns the reader of SmolLM3's Python code; it may print the calls."""
  read = lambda body: _python_calls(body, prints=True)
  return MarkedReader(Marks(CODE, CODE_END, read))


def _listed(body: str) -> list[tuple[str, dict[str, Any]]] | None:
  try:
    values = json.loads(body)
  except (ValueError, RecursionError):
    return None
  out = []
  for value in values if isinstance(values, list) else [values]:
    name = value.get("name") if isinstance(value, dict) else None
    arguments = None
    if isinstance(value, dict):
      arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not isinstance(arguments, dict):
      return None
    out.append((name, arguments))
  return out


def _python_calls(
  body: str, prints: bool = False
) -> list[tuple[str, dict[str, Any]]] | None:
  """Reads calls with named arguments that are literals; runs nothing.

  Args:
    body: the calls, one to a line.
    prints: if True, `print(call)` stands for the call.
  """
  try:
    lines = ast.parse(body.strip()).body
    return [_python_call(_printed(line) if prints else line) for line in lines]
  # The text is the model's, and may be nested too deeply for the parser.
  except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
    return None


def _printed(line: ast.stmt) -> ast.stmt:
  """Returns what a line prints as a line, or the line itself."""
  match line:
    case ast.Expr(ast.Call(ast.Name("print"), [inner], [])):
      return ast.Expr(inner)
  return line


def _python_call(line: ast.stmt) -> tuple[str, dict[str, Any]]:
  call = line.value if isinstance(line, ast.Expr) else None
  if not isinstance(call, ast.Call) or call.args:
    raise ValueError("expected name(argument=value, ...)")
  arguments = {}
  for keyword in call.keywords:
    if keyword.arg is None:
      raise ValueError("expected named arguments")
    value = ast.literal_eval(_Json().visit(keyword.value))
    json.dumps(value, allow_nan=False)  # sets, bytes and numbers beyond JSON are none
    arguments[keyword.arg] = value
  return ast.unparse(call.func), arguments


class _Json(ast.NodeTransformer):
  """Replaces `true`, `false` and `null` by their values."""

  def visit_Name(self, node: ast.Name) -> ast.AST:
    if node.id not in _JSON_NAMES:
      return node
    return ast.copy_location(ast.Constant(_JSON_NAMES[node.id]), node)
