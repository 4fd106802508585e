"""Text files of users: UTF-8, in which only a line feed ends a line."""

from __future__ import annotations

import os
import pathlib


def read(path: str | os.PathLike[str]) -> str:
  """Returns the text of a file without a byte order mark.

  Raises:
    OSError: the file cannot be read.
    ValueError: the file is no UTF-8; names it.
  """
  content = pathlib.Path(path).expanduser().read_bytes()
  try:
    return content.decode("utf-8-sig")
  except UnicodeDecodeError as error:
    raise ValueError(
      f"{path} is no UTF-8 text ({error}). Save it as UTF-8, or name another file"
    ) from error


def lines(text: str) -> list[str]:
  """Splits a text at line feeds, and drops a carriage return before each of them.

  `str.splitlines` splits at eight further characters, such as U+2028, which texts hold.
  """
  parts = text.removesuffix("\n").split("\n") if text else []
  return [line.removesuffix("\r") for line in parts]
