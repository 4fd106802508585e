"""Functions of Python's standard library with their docstrings, read as text.

Every machine that runs Python has this text; nothing of it is imported or executed.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import pathlib
import re
import sysconfig
import warnings
from collections.abc import Iterator

# Tests, tools and vendored packages: hardly a docstring, or text about something else.
_SKIPPED = frozenset(
  [
    "__pycache__",
    "config",
    "dist-packages",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
  ]
)
_SENTENCE = re.compile(r"(.+?[.!?])(\s|$)")
_MIN_FUNCTIONS = 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class Function:
  """A function or method as its source gives it.

  Attributes:
    module: top-level module or package; a leading underscore is dropped, so that the
      Python version of a module (`_pydatetime` apart) stands with it.
    name: its name.
    arguments: names of its arguments in order, without stars.
    signature: `def name(arguments)` on one line, without annotations and defaults.
    doc: the docstring, indentation removed.
    summary: the docstring's first sentence, on one line.
  """

  module: str
  name: str
  arguments: tuple[str, ...]
  signature: str
  doc: str
  summary: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passage:
  """The docstring of a module or class."""

  module: str
  text: str


def read_stdlib(
  root: str | os.PathLike[str] | None = None,
) -> tuple[list[Function], list[Passage]]:
  """All documented functions, and the docstrings of modules and classes.

  Args:
    root: folder of the library's sources; None: that of the running Python.

  Returns:
    Both in the order of file names and lines.

  Raises:
    FileNotFoundError: the folder holds too little documented source, as in some
      minimal installations of Python.
  """
  folder = pathlib.Path(root or sysconfig.get_path("stdlib"))
  functions: list[Function] = []
  passages: list[Passage] = []
  for path in _source_files(folder):
    module = _module(path.relative_to(folder).parts[0])
    for item in _documented(path):
      doc = _clean(item)
      if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
        functions.append(_function(item, doc, module))
      else:
        passages.append(Passage(module=module, text=_heading(item) + doc))
  if len(functions) < _MIN_FUNCTIONS:
    raise FileNotFoundError(
      f"{folder} has {len(functions)} documented functions, at least {_MIN_FUNCTIONS} "
      "are needed: install the full standard library with its sources (on Debian the "
      "packages python3 and libpython3-stdlib)"
    )
  return functions, passages


def _source_files(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  for path in sorted(folder.rglob("*.py")):
    parts = path.relative_to(folder).parts[:-1]
    if not any(part in _SKIPPED or part.startswith("config-") for part in parts):
      yield path


def _module(part: str) -> str:
  name = part.removesuffix(".py").lstrip("_")
  # _pydatetime, _pyio and _pydecimal are the Python halves of datetime, io, decimal.
  return re.sub(r"^py_?(?=(abc|datetime|decimal|io|long)$)", "", name) or part


Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _documented(path: pathlib.Path) -> Iterator[Documented]:
  """The module, its classes and functions, as far as they have a docstring."""
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")  # invalid escapes in somebody else's strings
      tree = ast.parse(path.read_bytes())
  except (SyntaxError, ValueError, OSError):
    return  # templates and data that only look like modules
  yield from _walk(tree)


def _walk(node: ast.AST) -> Iterator[Documented]:
  is_scope = isinstance(node, Documented)
  if is_scope and ast.get_docstring(node, clean=False):
    yield node
  # Statements only: most of a tree are expressions, and none of them has a docstring.
  for field in ("body", "orelse", "handlers", "finalbody", "cases"):
    for child in getattr(node, field, ()):
      yield from _walk(child)


def _clean(item: Documented) -> str:
  doc = inspect.cleandoc(ast.get_docstring(item, clean=False) or "").strip()
  return re.sub(r"[ \t]+\n", "\n", doc)


def _heading(item: Documented) -> str:
  return f"class {item.name}:\n" if isinstance(item, ast.ClassDef) else ""


def _function(
  item: ast.FunctionDef | ast.AsyncFunctionDef, doc: str, module: str
) -> Function:
  arguments = item.args
  for argument in _each(arguments):
    argument.annotation = None
  arguments.defaults = []
  arguments.kw_defaults = [None for _ in arguments.kwonlyargs]
  return Function(
    module=module,
    name=item.name,
    arguments=tuple(argument.arg for argument in _each(arguments)),
    signature=f"def {item.name}({ast.unparse(arguments)})",
    doc=doc,
    summary=_first_sentence(doc),
  )


def _each(arguments: ast.arguments) -> list[ast.arg]:
  """All arguments in the order in which they are written."""
  plain = [*arguments.posonlyargs, *arguments.args]
  star = [arguments.vararg] if arguments.vararg else []
  double = [arguments.kwarg] if arguments.kwarg else []
  return [*plain, *star, *arguments.kwonlyargs, *double]


def _first_sentence(doc: str) -> str:
  paragraph = " ".join(doc.split("\n\n", 1)[0].split())
  match = _SENTENCE.match(paragraph)
  return match.group(1) if match else paragraph
