"""Compares answers in text form as numbers, without executing them as code.

`evaluate` reads numbers, fractions, + - * / ^, parentheses, percent, square and other
roots and pi, in plain text or LaTeX. Rational results are exact; a result with an
irrational part is a float. The length and nesting of the text and the bits of every
intermediate number are bounded, so that a text that is made to be slow takes at most
milliseconds.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

Number = Fraction | float

# Characters besides the hyphen that are read as a minus: the minus sign, the en dash,
# and the small and the full-width hyphen.
MINUSES = "\u2212\u2013\ufe63\uff0d"

MAX_CHARACTERS = 1000  # of a text; longer texts are not parsed
MAX_DEPTH = 40  # nested brackets and exponents, far below Python's recursion limit
MAX_BITS = 4096  # bits of a numerator or denominator; larger numbers become floats

_TOKEN = re.compile(
  r"\s*(?:(?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4}(?![0-9]))?)"
  r"|(?P<name>\\?[a-zA-Z]+)|(?P<sign>\*\*|[-+*/^(){}\[\]%π√]))"
)
# Commas between groups of three digits: 1,250 but not 1,25 or 0.1,234.
_THOUSANDS = re.compile(r"(?<![0-9.,])([0-9]{1,3})((?:,[0-9]{3})+)(?![0-9,])")
# (pattern, replacement) pairs that reduce different spellings to one. They are applied
# in this order.
_SPELLINGS = (
  (r"\\(?:left|right|displaystyle|,|!|;|:|quad|qquad)(?![a-zA-Z])", ""),
  (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
  (r"\\(?:text|mathrm|mbox|textbf|mathbf)\s*\{[^{}]*\}\s*$", ""),  # units
  (r"\\(?:times|cdot)(?![a-zA-Z])|[\u00d7\u00b7\u2217]", "*"),
  (r"\\div(?![a-zA-Z])|\u00f7", "/"),
  (f"[{MINUSES}]", "-"),
  (r"\\%", "%"),
  (r"\\[$]|[$£€]|\\\(|\\\)|\\\[|\\\]", ""),
  (r"\{,\}", ","),
  (r"°|\^\{?\\circ\}?", ""),
)


class NotANumber(ValueError):
  """The text is not an expression for `evaluate`, or has no finite value."""


def evaluate(text: str, *, ignore_percent: bool = False) -> Number:
  """Returns the value of an expression: a Fraction, or a float if it is irrational.

  Args:
    text: an expression such as "3/4", "1,250.5", "2^{10}", "-\\frac{1}{2}",
      "2\\sqrt{3}", "50%". An integer before a fraction of integers is a mixed number:
      "1\\frac12" is 3/2.
    ignore_percent: if True, percent signs are dropped instead of dividing by 100.

  Raises:
    NotANumber: the text is not an expression, or has no finite value.
  """
  return _Parser(_normalised(text), ignore_percent).value()


def last_boxed(text: str) -> str | None:
  """Returns the content of the last closed \\boxed{...}; None if there is none.

  A box without its closing brace is no answer: the completion may have been cut there.
  """
  opened: list[int] = []
  last, end = -1, -1
  for match in re.finditer(r"[{}]", text):
    if match[0] == "{":
      opened.append(match.end())
    elif opened:
      begin = opened.pop()
      if begin > last and text.endswith(("\\boxed{", "\\fbox{"), 0, begin):
        last, end = begin, match.start()
  return None if end < 0 else text[last:end]


def same(
  a: str, b: str, *, relative: float = 1e-9, ignore_percent: bool = False
) -> bool:
  """Returns whether two answers have the same value.

  Rational values must be equal. If one value is irrational, the values may differ by
  `relative` times the larger one, or by 1e-12. If an answer is not a number, both are
  compared as text, without white space, case and LaTeX formatting.
  """
  try:
    x = evaluate(a, ignore_percent=ignore_percent)
    y = evaluate(b, ignore_percent=ignore_percent)
  except NotANumber:
    return _plain(a) == _plain(b) != ""
  if isinstance(x, Fraction) and isinstance(y, Fraction):
    return x == y
  # The absolute tolerance is for values whose exact value is 0, such as sqrt(2)^2 - 2:
  # a relative tolerance never accepts a difference from 0.
  return math.isclose(float(x), float(y), rel_tol=relative, abs_tol=1e-12)


def _normalised(text: str) -> str:
  inner = last_boxed(text)
  text = (text if inner is None else inner).strip()
  if len(text) > MAX_CHARACTERS:
    raise NotANumber(f"{len(text)} characters; expected at most {MAX_CHARACTERS}")
  for pattern, replacement in _SPELLINGS:
    text = re.sub(pattern, replacement, text)
  text = re.sub(r"^\s*[a-zA-Z]\s*=", "", text)  # "x = 5"
  text = text.strip().rstrip(".")
  return _THOUSANDS.sub(lambda m: m[1] + m[2].replace(",", ""), text)


def _plain(text: str) -> str:
  """Returns the text without formatting, in lower case."""
  inner = last_boxed(text)
  text = text if inner is None else inner
  text = re.sub(r"\\(?:text|mathrm|mbox|textbf|mathbf)\s*\{([^{}]*)\}", r"\1", text)
  text = re.sub(r"\\(?:left|right|,|!|;|:|quad)(?![a-zA-Z])|[\s$]", "", text)
  return text.rstrip(".").casefold()


class _Parser:
  """A recursive-descent parser that computes the value while it parses."""

  def __init__(self, text: str, ignore_percent: bool):
    self._percent = Fraction(1, 1 if ignore_percent else 100)
    self._tokens: list[str] = []
    place = 0
    text = text.rstrip()
    while place < len(text):
      match = _TOKEN.match(text, place)
      if match is None:
        raise NotANumber(f"{text[place]!r} is no part of a number")
      self._tokens.append(match[0].strip())
      place = match.end()
    self._place = 0
    self._depth = 0

  def value(self) -> Number:
    result = self._sum()
    if self._place < len(self._tokens):
      raise NotANumber(f"{self._peek()!r} comes after the end")
    return result

  def _peek(self) -> str:
    return self._tokens[self._place] if self._place < len(self._tokens) else ""

  def _next(self) -> str:
    token = self._peek()
    self._place += 1
    return token

  def _expect(self, token: str) -> None:
    actual = self._next()
    if actual != token:
      raise NotANumber(f"{actual or 'the end'!r} instead of {token!r}")

  def _deeper(self) -> None:
    self._depth += 1
    if self._depth > MAX_DEPTH:
      raise NotANumber(f"nested more than {MAX_DEPTH} deep")

  def _sum(self) -> Number:
    total = self._product()
    while self._peek() in ("+", "-"):
      sign = 1 if self._next() == "+" else -1
      total = _bounded(operator.add, total, sign * self._product())
    return total

  def _product(self) -> Number:
    result = self._signed()
    while True:
      token = self._peek()
      if token in ("*", "/"):
        self._next()
        divide = token == "/"
        result = (_quotient if divide else _times)(result, self._signed())
      elif self._begins_factor(token):  # a product without a sign, such as 2\\pi
        result = _times(result, self._power())
      else:
        return result

  def _begins_factor(self, token: str) -> bool:
    """Returns whether `token` starts a factor: 2(3), 2\\pi, 2 sqrt(3)."""
    if token[:1].isdigit() or token.startswith("."):
      raise NotANumber(f"a second number, {token!r}, without a sign between")
    return token[:1].isalpha() or token[:1] in ("\\", "(", "{", "π", "√")

  def _signed(self) -> Number:
    sign = 1
    while self._peek() in ("+", "-"):
      sign *= 1 if self._next() == "+" else -1
    return sign * self._power()

  def _power(self) -> Number:
    base = self._percented(self._atom())
    if self._peek() not in ("^", "**"):
      return base
    self._next()
    self._deeper()
    result = power(base, self._signed())
    self._depth -= 1
    return result

  def _percented(self, x: Number) -> Number:
    while self._peek() == "%":
      self._next()
      x = _times(x, self._percent)
    return x

  def _atom(self) -> Number:
    self._deeper()
    value = self._operand(self._next())
    self._depth -= 1
    return value

  def _operand(self, token: str) -> Number:
    closing = {"(": ")", "{": "}", "[": "]"}.get(token)
    if closing:
      inner = self._sum()
      self._expect(closing)
      return inner
    match token.removeprefix("\\"):
      case "frac":
        return _quotient(self._argument(), self._argument())
      case "sqrt" | "√":
        return self._root()
      case "pi" | "π":
        return math.pi
    if not token[:1].isdigit() and not token.startswith("."):
      raise NotANumber(f"{token or 'the end'!r} is no number")
    return self._mixed(token)

  def _mixed(self, token: str) -> Number:
    """Reads a numeral, or a mixed number such as 1\\frac{1}{2}."""
    number = _numeral(token)
    # Only a fraction of two integers makes a mixed number: 2\\frac{\\pi}{3} is a
    # product.
    match self._tokens[self._place : self._place + 7]:
      case ["\\frac", "{", a, "}", "{", b, "}"]:
        plain = (token + a + b).isdigit()
      case ["\\frac", both, *_]:
        plain = len(both) == 2 and (token + both).isdigit()
      case _:
        plain = False
    return _bounded(operator.add, number, self._atom()) if plain else number

  def _argument(self) -> Number:
    """Reads the argument of a LaTeX command: a group, or one digit of \\frac12."""
    token = self._peek()
    if token.isdigit() and len(token) > 1:
      self._tokens[self._place] = token[1:]
      return Fraction(int(token[0]))
    return self._atom()

  def _root(self) -> Number:
    degree: Number = Fraction(2)
    if self._peek() == "[":
      self._next()
      degree = self._sum()
      self._expect("]")
    if not (isinstance(degree, Fraction) and degree.denominator == 1 and degree > 0):
      raise NotANumber(f"a root of degree {degree}")
    # In LaTeX, \sqrt12 is the root of 1 followed by 2, as \frac12 is 1/2. In plain
    # text, "√12" is the root of 12.
    name = self._tokens[self._place - 1]
    return root(self._argument() if name == "\\sqrt" else self._atom(), int(degree))


def power(base: Number, exponent: Number) -> Number:
  """Returns base ** exponent, exact if it is rational and has at most MAX_BITS bits.

  Raises:
    NotANumber: there is no finite real value.
  """
  if base == 0 and exponent <= 0:
    raise NotANumber(f"0 to the power of {exponent}")
  whole = isinstance(exponent, Fraction) and exponent.denominator == 1
  if whole and isinstance(base, Fraction):
    # The number of bits is bounded before the power is computed, so 9^9^9 is never
    # computed exactly.
    if abs(exponent) * _bits(base) <= MAX_BITS:
      return base ** int(exponent)
  elif not whole and isinstance(exponent, Fraction) and base > 0:
    # b^(n/d) is (d-th root of b)^n, exact if this root is rational: 8^(2/3) is 4.
    inner = root(base, exponent.denominator)
    if isinstance(inner, Fraction):
      return power(inner, Fraction(exponent.numerator))
  return _finite(lambda: float(base) ** float(exponent))


def root(x: Number, degree: int) -> Number:
  """Returns the real root of degree `degree`, exact if it is rational.

  Raises:
    NotANumber: the degree is even and x is negative.
  """
  if x < 0:
    if degree % 2 == 0:
      raise NotANumber(f"root of degree {degree} of {float(x)}")
    return -root(-x, degree)
  if isinstance(x, Fraction):
    above = _whole_root(x.numerator, degree)
    below = _whole_root(x.denominator, degree)
    if above is not None and below is not None:
      return Fraction(above, below)
  return _finite(lambda: float(x) ** (1 / degree))


def _whole_root(n: int, degree: int) -> int | None:
  """Returns the integer r with r ** degree == n; None if there is none."""
  if n < 2 or degree == 1:
    return n
  if degree > n.bit_length():  # 2**degree is larger than n already
    return None
  try:
    near = math.isqrt(n) if degree == 2 else round(n ** (1 / degree))
  except OverflowError:
    return None
  # A float has 53 bits, so the rounded root may be off by one.
  return next((r for r in (near - 1, near, near + 1) if r**degree == n), None)


def _numeral(token: str) -> Number:
  # A decimal digit has log2(10) = 3.3 bits, rounded up to 4.
  if sum(c.isdigit() for c in token) * 4 > MAX_BITS:
    raise NotANumber(f"a number of {len(token)} digits")
  mantissa, _, exponent = token.lower().partition("e")
  number = Fraction(mantissa if mantissa.strip(".") else "0")
  return _times(number, power(Fraction(10), Fraction(int(exponent or "0"))))


def _times(a: Number, b: Number) -> Number:
  return _bounded(operator.mul, a, b)


def _quotient(a: Number, b: Number) -> Number:
  if b == 0:
    raise NotANumber("division by zero")
  return _bounded(operator.truediv, a, b)


def _bounded(operation: Callable[[Any, Any], Any], a: Number, b: Number) -> Number:
  """Applies an operation, exactly if both numbers are exact.

  A result of more than MAX_BITS bits, or with an inexact operand, is a float.
  """
  if isinstance(a, Fraction) and isinstance(b, Fraction):
    exact = operation(a, b)
    return exact if _bits(exact) <= MAX_BITS else _finite(lambda: float(exact))
  return _finite(lambda: operation(float(a), float(b)))


def _bits(x: Fraction) -> int:
  return max(x.numerator.bit_length(), x.denominator.bit_length())


def _finite(compute: Callable[[], Any]) -> float:
  try:
    result = compute()
  except (OverflowError, ZeroDivisionError) as error:
    raise NotANumber("too large") from error
  if isinstance(result, complex) or not math.isfinite(result):
    raise NotANumber("no finite real value")
  return result
