"""Imports an example as a module; those that import each other find each other."""

import importlib
import pathlib
import sys
from types import ModuleType

EXAMPLES = pathlib.Path(__file__).parent.parent.parent / "examples"


def example(name: str) -> ModuleType:
  sys.path.insert(0, str(EXAMPLES))
  try:
    return importlib.import_module(name)
  finally:
    sys.path.remove(str(EXAMPLES))
