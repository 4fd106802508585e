import math
import random
from fractions import Fraction

import pytest

from tests import toys_text
from tunix.rl.reward import maths


@pytest.mark.parametrize(
  ("text", "value"),
  [
    ("42", 42),
    ("-3.50", Fraction(-7, 2)),
    (".5", Fraction(1, 2)),
    ("5.", 5),
    ("1e3", 1000),
    ("2.5E-1", Fraction(1, 4)),
    ("1,234,567", 1234567),
    ("1{,}000", 1000),
    ("$1,250.5", Fraction(2501, 2)),
    ("3/4", Fraction(3, 4)),
    ("1 + 2*3", 7),
    ("(1+2)*3", 9),
    ("8/4/2", 1),
    ("5-3-1", 1),
    ("2^3^2", 512),  # from the right
    ("-2^2", -4),
    ("2^-1", Fraction(1, 2)),
    ("2**10", 1024),
    ("4^(1/2)", 2),
    ("8^{2/3}", 4),
    ("--3", 3),
    ("50%", Fraction(1, 2)),
    (r"50\%", Fraction(1, 2)),
    (r"\frac{1}{2}", Fraction(1, 2)),
    (r"\dfrac12", Fraction(1, 2)),
    (r"-\frac{3}{-4}", Fraction(3, 4)),
    (r"1\frac{1}{2}", Fraction(3, 2)),  # mixed number
    (r"1\frac12", Fraction(3, 2)),
    (r"2\left(3+4\right)", 14),
    (r"2 \cdot 3", 6),
    (r"6 \div 4", Fraction(3, 2)),
    (r"\sqrt{16}", 4),
    (r"\sqrt[3]{-27}", -3),
    (r"\sqrt[3]{1000000000000000000000}", 10**7),
    ("sqrt(9/4)", Fraction(3, 2)),
    (r"so \boxed{\frac{6}{8}} it is", Fraction(3, 4)),
    (r"first \boxed{1}, then \boxed{2}", 2),
    (r"\boxed{1} or rather \boxed{2", 1),  # cut at the limit of tokens
    (r"\boxed{2 \boxed{1}", 1),
    (r"} \boxed{\frac{1}{2}} { {2}", Fraction(1, 2)),
    (r"\boxed{7" * 30_000 + "}", 7),  # in linear time
    (r"\[ 7 \]", 7),
    (r"90^\circ", 90),
    (r"12\text{ cm}", 12),
    ("x = 5", 5),
    ("7.", 7),
    ("10 \u00d7 2", 20),
    ("10 \u2212 2", 8),
    *((f"{minus}3e{minus}1", Fraction(-3, 10)) for minus in toys_text.MINUSES),
  ],
)
def test_rational_values_are_exact(text, value):
  found = maths.evaluate(text)
  assert isinstance(found, Fraction)
  assert found == value


@pytest.mark.parametrize(
  ("text", "value"),
  [
    (r"\pi", math.pi),
    ("2π", 2 * math.pi),
    (r"\frac{\pi}{4}", math.pi / 4),
    (r"2\sqrt{3}", 2 * math.sqrt(3)),
    ("√2/2", math.sqrt(2) / 2),
    (r"\sqrt{2}^2", 2.0),
    ("2^0.5", math.sqrt(2)),
    (r"\pi^2", math.pi**2),
    ("3(pi+1)", 3 * (math.pi + 1)),
    ("(1/3)^999999999", 0.0),
  ],
)
def test_irrational_values_are_floats(text, value):
  found = maths.evaluate(text)
  assert isinstance(found, float)
  assert found == pytest.approx(value, rel=1e-14)


@pytest.mark.parametrize(
  "text",
  [
    "",
    "abc",
    "1 2",
    "1/0",
    "0^0",
    "0^-1",
    "(-8)^(1/2)",
    r"\sqrt{-1}",
    r"\frac{1}",
    "(1",
    "1)",
    "1+",
    "*2",
    "__import__('os')",
    "1;2",
    "(1,2)",
    "9" * 2000,
    "9^9^9^9^9",
    "((" * 500,
    r"\sqrt" * 150 + "2",
    r"\frac" * 150 + "2",
    "2^" * 400 + "2",
    "-" * 900,
    "1e9999",
    "10^10^10",
    r"\sqrt[0]{2}",
    "2^9999/2^9999",
  ],
)
def test_what_is_no_number_is_refused(text):
  with pytest.raises(maths.NotANumber):
    maths.evaluate(text)


@pytest.mark.parametrize(
  ("a", "b", "equal"),
  [
    ("0.5", r"\frac{1}{2}", True),
    ("0.333", "1/3", False),
    ("1/3", "2/6", True),
    (r"\sqrt{8}", r"2\sqrt{2}", True),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", True),
    (r"\pi", "3.14159", False),
    (r"\text{Evelyn}", "evelyn", True),
    (r"\boxed{\text{(A)}}", "(A)", True),
    ("(1, 2)", "(1,2)", True),
    ("x+1", "x + 1", True),
    ("cat", "dog", False),
    ("", "", False),
    ("5", "five", False),
    ("50%", "50", False),
    (r"\infty", r"\infty", True),
  ],
)
def test_same(a, b, equal):
  assert maths.same(a, b) is equal
  assert maths.same(b, a) is equal


def test_percent_signs_can_be_ignored():
  assert maths.same(r"50\%", "50", ignore_percent=True)


def test_tolerance_is_for_irrational_values_only():
  assert maths.same(r"\pi", "3.14159", relative=1e-5)
  assert not maths.same("0.33333333", "1/3", relative=1e-5)


def random_expression(rng, depth=3):
  """Text for Python and the value that Python's own Fractions give it."""
  if depth == 0 or rng.random() < 0.2:
    n = rng.randrange(0, 30)
    return str(n), Fraction(n)
  a, x = random_expression(rng, depth - 1)
  b, y = random_expression(rng, depth - 1)
  kind = rng.choice("+-*/fp")
  if kind in "/f" and y == 0:
    kind = "+"
  if kind == "p":
    return rf"({a})^{{2}}", x**2
  if kind == "f":
    return rf"\frac{{{a}}}{{{b}}}", x / y
  value = {"+": x + y, "-": x - y, "*": x * y, "/": x / y if y else 0}[kind]
  return f"({a}) {kind} ({b})" if rng.random() < 0.5 else f"(({a}){kind}({b}))", value


def test_random_expressions_have_the_value_of_exact_arithmetic():
  rng = random.Random(0)
  for _ in range(500):
    text, value = random_expression(rng)
    assert maths.evaluate(f"({text})") == value, text


def test_hostile_text_ends_as_a_number_or_as_none():
  """10,000 mutations; anything but a finite value or NotANumber fails."""
  rng = random.Random(1)
  seeds = [random_expression(rng, 4)[0] for _ in range(30)]
  seeds += [r"\boxed{\sqrt[3]{2}^{99}}", r"1,000\%", "9^9^9", "2(3)(4)π", r"\frac12"]
  pieces = [*"0123456789+-*/^(){}[]%.,\\ eπ√", r"\frac", r"\sqrt", "^99999", "((("]
  pieces += [r"\boxed{", "1e99", "9" * 300, r"\text{", "\0", "½", "٣"]
  values = 0
  for _ in range(10_000):
    text = list(rng.choice(seeds))
    for _ in range(rng.randrange(1, 6)):
      at = rng.randrange(len(text) + 1)
      text[at : at + rng.randrange(3)] = [rng.choice(pieces)] * rng.choice([1, 1, 50])
    try:
      value = maths.evaluate("".join(text))
    except maths.NotANumber:
      continue
    values += 1
    assert math.isfinite(value) if isinstance(value, float) else True
    if isinstance(value, Fraction):
      bits = max(value.numerator.bit_length(), value.denominator.bit_length())
      assert bits <= maths.MAX_BITS
  assert values > 500
