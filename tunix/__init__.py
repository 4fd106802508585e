"""Post-training of language models in JAX.

`__init__.pyi` lists the public names. A name is imported when it is first used, so that
`import tunix` loads neither jax nor any other heavy package (PEP 562).
"""

from __future__ import annotations

import ast
import importlib
import pathlib
import types
from typing import Any

from tunix import sft as _sft  # an empty package; loads nothing

__version__ = "0.1.0"


class _CallablePackage(types.ModuleType):
  """The package `tunix.sft`, whose name is also that of the job `tunix.sft(...)`.

  Importing a module of the package sets the attribute `sft` of this module to the
  package, so a function of the same name would be lost.
  """

  def __call__(self, *, model: Any, data: Any, **settings: Any) -> Any:
    """Runs the job sft, see `tunix.cli.one_call`."""
    from tunix.cli import one_call

    return one_call.sft(model=model, data=data, **settings)

  __call__.__qualname__ = "tunix.sft"  # what a TypeError about its arguments names


_sft.__class__ = _CallablePackage

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
