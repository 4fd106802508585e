"""argparse whose errors are exceptions, so that they come out as one line."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
  """An ArgumentParser that raises ValueError instead of exiting, and that takes no
  abbreviations."""

  def __init__(self, prog: str, description: str):
    super().__init__(prog=prog, description=description, allow_abbrev=False)

  def error(self, message: str) -> NoReturn:
    raise ValueError(f"{message}; see {self.prog} --help")
