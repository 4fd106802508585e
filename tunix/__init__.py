"""Post-training of language models in JAX.

`__init__.pyi` lists the public names. A name is imported when it is first used, so that
`import tunix` loads neither jax nor any other heavy package (PEP 562).
"""

from __future__ import annotations

import ast
import importlib
import pathlib
from typing import Any

__version__ = "0.1.0"

# Name -> module. Type checkers and editors read the same file.
_MODULES = {
  alias.name: str(statement.module)
  for statement in ast.parse(
    pathlib.Path(__file__).with_suffix(".pyi").read_text()
  ).body
  if isinstance(statement, ast.ImportFrom)
  for alias in statement.names
}

__all__ = ["__version__", *sorted(_MODULES)]


def __getattr__(name: str) -> Any:
  if name not in _MODULES:
    raise AttributeError(f"module 'tunix' has no attribute {name!r}; it has {__all__}")
  return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
  return sorted(__all__)
