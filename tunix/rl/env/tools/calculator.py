"""A tool that computes with rational numbers, exactly and in bounded time."""

from __future__ import annotations

import ast
import decimal
import fractions
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

_MAX_CHARS = 1000
_MAX_SHOWN = 100
_MAX_LEVELS = 200  # fewer than Python's stack has, wherever the call is
# About 1200 decimal digits: below the 4300 digits to which Python limits conversions.
_MAX_BITS = 4096
_MAX_EXPONENT = 1200
_MAX_FACTORIAL = 400
_DIGITS = 15  # of the approximation of a number without a finite decimal form

Number = fractions.Fraction

_BINARY: dict[type, Callable[[Number, Number], Any]] = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
  ast.FloorDiv: operator.floordiv,
  ast.Mod: operator.mod,
}
_UNARY: dict[type, Callable[[Number], Number]] = {
  ast.UAdd: operator.pos,
  ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
  """Computes an arithmetic expression exactly.

  It knows + - * / // % **, parentheses, and the functions abs, ceil, factorial, floor,
  gcd, lcm, max, min and round.

  Args:
    expression: The expression, such as (1 + 2) * 3 / 4.

  Returns:
    The value as an integer or decimal number, or as a fraction with an approximation.

  Raises:
    ValueError: the expression has other parts, or a number is too large.
  """
  if len(expression) > _MAX_CHARS:
    raise ValueError(
      f"the expression has {len(expression)} characters; expected at most {_MAX_CHARS}"
    )
  text = expression.strip()
  try:
    tree = ast.parse(text, mode="eval")
  except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
    shown = f"{text[:_MAX_SHOWN]}..." if len(text) > _MAX_SHOWN else text
    raise ValueError(f"{shown!r} is no arithmetic expression: {error}") from error
  try:
    return _shown(_value(tree.body, text))
  except ZeroDivisionError as error:
    raise ValueError("the expression divides by zero") from error


def _value(node: ast.expr, text: str, level: int = 0) -> Number:
  if level > _MAX_LEVELS:
    raise ValueError(f"the expression has more than {_MAX_LEVELS} levels")

  def inner(part: ast.expr) -> Number:
    return _value(part, text, level + 1)

  if isinstance(node, ast.Constant):
    return _literal(ast.get_source_segment(text, node) or "", node.value)
  if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
    return _UNARY[type(node.op)](inner(node.operand))
  if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
    return _power(inner(node.left), inner(node.right))
  if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
    combined = _BINARY[type(node.op)](inner(node.left), inner(node.right))
    return _bounded(Number(combined))
  if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
    if node.keywords:
      raise ValueError(f"{node.func.id} takes no arguments with names")
    return _function(node.func.id, [inner(x) for x in node.args])
  part = ast.get_source_segment(text, node) or text
  hint = "; write ** for powers" if "^" in part else ""
  raise ValueError(
    f"{part!r} is not allowed; expected numbers, + - * / // % **, parentheses and the "
    f"functions {', '.join(_FUNCTIONS)}{hint}"
  )


def _literal(source: str, value: object) -> Number:
  """Returns the exact value of a number: 0.1 is 1/10."""
  if isinstance(value, bool) or not isinstance(value, (int, float)):
    raise ValueError(f"{source} is no number")
  if isinstance(value, int):
    return _bounded(Number(value))
  number = decimal.Decimal(source.replace("_", ""))
  if number and abs(number.adjusted()) > _MAX_EXPONENT:
    raise ValueError(f"{source} is too large or too small")
  return _bounded(Number(number))


def _power(base: Number, exponent: Number) -> Number:
  if exponent.denominator != 1:
    raise ValueError(
      f"the exponent is {_shown(exponent)}; expected an integer, because roots are not "
      "exact"
    )
  if base == 0 and exponent < 0:
    raise ZeroDivisionError
  bits = max(base.numerator.bit_length(), base.denominator.bit_length())
  # The size is checked before the power is computed. Powers of 1 and -1 are small.
  if abs(base) not in (0, 1) and abs(exponent) * (bits - 1) > _MAX_BITS:
    raise ValueError("the power is too large: it has more than about 1200 digits")
  return _bounded(Number(base ** (int(exponent) if abs(base) != 1 else exponent % 2)))


def _function(name: str, values: Sequence[Number]) -> Number:
  if name not in _FUNCTIONS:
    raise ValueError(f"{name} is unknown; expected one of {', '.join(_FUNCTIONS)}")
  try:
    return _bounded(Number(_FUNCTIONS[name](*values)))
  except TypeError as error:
    raise ValueError(f"{name} has {len(values)} arguments: {error}") from error


def _integer(value: Number) -> int:
  if value.denominator != 1:
    raise ValueError(f"{_shown(value)} is no integer")
  return value.numerator


def _factorial(value: Number) -> int:
  n = _integer(value)
  if not 0 <= n <= _MAX_FACTORIAL:
    raise ValueError(f"factorial of {n}; expected 0 to {_MAX_FACTORIAL}")
  return math.factorial(n)


def _round(value: Number, digits: Number | None = None) -> Number:
  places = 0 if digits is None else _integer(digits)
  if abs(places) > _MAX_EXPONENT:
    raise ValueError(f"round to {places} digits; expected at most {_MAX_EXPONENT}")
  return Number(round(value, places))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
  "abs": abs,
  "ceil": math.ceil,
  "factorial": _factorial,
  "floor": math.floor,
  "gcd": lambda *values: math.gcd(*map(_integer, values)),
  "lcm": lambda *values: math.lcm(*map(_integer, values)),
  "max": lambda *values: max(values),
  "min": lambda *values: min(values),
  "round": _round,
}


def _bounded(value: Number) -> Number:
  if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
    raise ValueError("the number is too large: it has more than about 1200 digits")
  return value


def _shown(value: Number) -> str:
  """Returns 3, 0.25, or 1/3 (about 0.333333333333333)."""
  if value.denominator == 1:
    return str(value.numerator)
  rest, places = value.denominator, 0
  for prime in (2, 5):
    power = 0
    while rest % prime == 0:
      rest, power = rest // prime, power + 1
    places = max(places, power)
  with decimal.localcontext() as context:
    context.prec = _DIGITS
    if rest == 1 and places <= 2 * _DIGITS:
      scaled = abs(value.numerator) * 10**places // value.denominator
      digits = str(scaled).rjust(places + 1, "0")
      sign = "-" if value < 0 else ""
      return f"{sign}{digits[:-places]}.{digits[-places:]}"
    ratio = decimal.Decimal(value.numerator) / decimal.Decimal(value.denominator)
    return f"{value.numerator}/{value.denominator} (about {ratio})"
