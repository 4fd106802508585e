"""Imports of packages that a plain installation may lack."""

from __future__ import annotations

import importlib
from types import ModuleType


def require(module: str, purpose: str, install: str) -> ModuleType:
  """Imports `module`, or says what it is for and how to get it.

  Raises:
    ImportError: the package is missing; the message names the pip command.
  """
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise ImportError(
      f"{purpose} needs the package {module.split('.')[0]!r}: pip install {install}"
    ) from error
