"""Import of optional packages."""

from __future__ import annotations

import importlib
from types import ModuleType


def require(module: str, purpose: str, install: str) -> ModuleType:
  """Imports a module of an optional package.

  Args:
    module: name of the module.
    purpose: what needs it, for the message.
    install: argument of `pip install`.

  Raises:
    ImportError: the package is missing; the message names the pip command.
  """
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise ImportError(
      f"{purpose} needs the package {module.split('.')[0]!r}: pip install {install}"
    ) from error
