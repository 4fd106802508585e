"""Text of records and models, made safe for a terminal."""

from __future__ import annotations

import re
import sys
from typing import TextIO

# Green quotation marks, before and after text that is trained.
COLOUR = ("\033[32m«", "»\033[0m")
# All control characters except the line break and the tab. An escape sequence can
# rename the window, move the cursor or write to the clipboard.
_CONTROL = re.compile(
  f"({'|'.join(map(re.escape, COLOUR))})|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


def shown(text: str, stream: TextIO | None = None) -> str:
  r"""Returns a text with control characters as `\x1b` if a terminal shows it.

  Args:
    text: any text; the sequences of `COLOUR` stay.
    stream: stream that the text is for; None: standard output. A pipe or a file
      receives the text unchanged.
  """
  if not (stream or sys.stdout).isatty():
    return text
  return _CONTROL.sub(lambda found: found[1] or f"\\x{ord(found[0]):02x}", text)
