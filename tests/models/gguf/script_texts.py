"""Texts of many scripts from a seed, for comparing tokenizers."""

import random


def _letters(*ranges):
  return [chr(c) for first, last in ranges for c in range(first, last + 1)]


SCRIPTS = {
  "latin": _letters((0x61, 0x7A), (0x41, 0x5A), (0xC0, 0xD6), (0xD8, 0xF6)),
  "cyrillic": _letters((0x410, 0x44F)),
  "greek": _letters((0x391, 0x3A1), (0x3A3, 0x3C9)),
  "cjk": _letters((0x4E00, 0x9FA5)),
  "kana": _letters((0x3041, 0x3096), (0x30A1, 0x30FA)),
  "hangul": _letters((0xAC00, 0xD7A3)),
  "arabic": _letters((0x621, 0x63A), (0x641, 0x652)),
  "hebrew": _letters((0x5D0, 0x5EA)),
  "devanagari": _letters((0x904, 0x94F)),
  "thai": _letters((0xE01, 0xE3A), (0xE40, 0xE4E)),
  "emoji": [*"😀🥰👍🎉🚀🌍🔥💡🐍", "👩‍💻", "👨‍👩‍👧", "🇩🇪", "🏳️‍🌈", "👍🏽", "❤️"],
  "digits": [*"01234567890123456789", *"٠١٢٣४५²³½Ⅳ"],
  "marks": [*"aeiou", *_letters((0x300, 0x308)), "\u0323", "\u200b", "\u200d"],
  "rare": _letters((0x10330, 0x10332), (0x1D400, 0x1D402), (0x13000, 0x13002))
  + [*"\ufffd\x7f\x85\xa0\u2028\u3000\x1f\x0b\x0c\xad\ufeff"],
}
CODE = (
  "def f(x):\n    return x**2\n",
  "for (int i = 0; i < n; ++i) {\n\ta[i] += 1;\n}\n",
  "SELECT * FROM t WHERE a='b';",
  '<div class="x">\n  <p>hi</p>\n</div>',
  '{"a": [1, 2.5e-3, null]}',
  "https://example.com/a?b=c&d=%20",
  "x != y && z || !w",
  "\\frac{a}{b} $x^2$",
  "if(x)\r\n  y();\r\n",
)
WORDS = (
  *("the", "of", "and", "to", "in", "hello", "world", "model", "Training", "'tis"),
  *("it's", "I'm", "you're", "they'll", "don't", "he'd", "we've", "CAN'T", "She'S"),
  *("ABCdef", "camelCase", "HTTPServer", "naïve", "café"),
)
GAPS = (
  *(" ", " ", " ", "", "  ", "   ", "\n", "\n\n", "\t", "\r\n", " \n", "\n  ", "\xa0"),
  *(".", ", ", "! ", "? ", " - ", "...", '"', " (", ") ", "'"),
)
RUNS = (" ", "\n", "\t", "\r\n", " \n")


def texts(count, specials=(), seed=0):
  """Mixed texts with words, runs of spaces, numbers, code, and special tokens."""
  rng = random.Random(seed)
  kinds = {
    "script": lambda: rng.choices(
      SCRIPTS[rng.choice(sorted(SCRIPTS))], k=rng.randint(1, 9)
    ),
    "words": lambda: " ".join(rng.choices(WORDS, k=rng.randint(1, 6))),
    "code": lambda: rng.choice(CODE),
    "run": lambda: rng.choice(RUNS) * rng.randint(1, 40),
    "number": lambda: str(rng.randint(0, 10 ** rng.randint(1, 12))),
    "special": lambda: rng.choice([*specials, ""]),
  }
  weights = (45, 25, 8, 6, 6, 10)

  def part():
    kind = rng.choices([*kinds], weights)[0]
    return "".join(kinds[kind]()) + rng.choice(GAPS)

  return ["".join(part() for _ in range(rng.randint(1, 12))) for _ in range(count)]
