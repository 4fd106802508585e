"""Text for a terminal: numbers with nouns, and records and models made safe."""

from __future__ import annotations

import re
import sys
from typing import TextIO

# Green quotation marks, before and after text that is trained.
COLOUR = ("\033[32m«", "»\033[0m")
# All control characters except the line break and the tab. An escape sequence can
# rename the window, move the cursor or write to the clipboard; other ends of a line
# forge lines, and marks of direction show a text in another order than it has.
_CONTROL = re.compile(
  f"({'|'.join(map(re.escape, COLOUR))})"
  "|[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069]"
)


def counted(count: int, noun: str) -> str:
  """Returns a number with its noun: 1 step, 2 steps, 1,000 batches.

  Args:
    count: the number.
    noun: the noun for 1; words that follow `of` stay: "prompt of the teacher".
  """
  head, of, rest = noun.partition(" of ")
  ending = "es" if head.endswith(("ch", "s", "x")) else "s"
  return f"{count:,} {head}{ending * (count != 1)}{of}{rest}"


def shown(text: str, stream: TextIO | None = None) -> str:
  r"""Returns a text with control characters as `\x1b` if a terminal shows it.

  Args:
    text: any text; the sequences of `COLOUR` stay.
    stream: stream that the text is for; None: standard output. A pipe or a file
      receives the text unchanged, but for halves of surrogate pairs (`\ud800`), which
      no stream takes.
  """
  text = text.encode(errors="backslashreplace").decode()
  if not (stream or sys.stdout).isatty():
    return text
  return _CONTROL.sub(lambda match: match[1] or _escaped(match[0]), text)


def one_line(text: str) -> str:
  """Returns a text for a log: in one line, with white space as single spaces."""
  return " ".join(text.split())


def _escaped(character: str) -> str:
  code = ord(character)
  return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
