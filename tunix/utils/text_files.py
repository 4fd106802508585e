"""Text files of users: UTF-8, in which only a line feed ends a line."""

from __future__ import annotations

import os
import pathlib


def read(path: str | os.PathLike[str]) -> str:
  """Returns the text of a file without a byte order mark.

  Raises:
    OSError: the file cannot be read.
    UnicodeDecodeError: the file is no UTF-8.
  """
  return pathlib.Path(path).expanduser().read_bytes().decode("utf-8-sig")


def lines(text: str) -> list[str]:
  """Splits a text at line feeds, and drops a carriage return before each of them.

  `str.splitlines` splits at eight further characters, such as U+2028, which texts hold.
  """
  found = text.removesuffix("\n").split("\n") if text else []
  return [line.removesuffix("\r") for line in found]
