"""Functions named in configurations: "pkg.mod:fn", "/path/file.py:fn(name=1)".

Arguments are literals that `ast` parses; no part of a string is evaluated.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib
import importlib.util
import os
import pathlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_FORMS = 'write "pkg.mod:fn", "/path/file.py:fn" or "...:fn(name=1)"'


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallString:
  """The parts of a call string.

  Attributes:
    source: module or file; None: the string has only a name.
    name: name of the function; None: the string has only a source.
    args: positional arguments.
    kwargs: keyword arguments; None: the string has no parentheses.
  """

  source: str | None
  name: str | None
  args: tuple[Any, ...] = ()
  kwargs: dict[str, Any] | None = None


def parse_call_string(text: str) -> CallString:
  """Parses "source:name(args)"; source, name or the call may be missing.

  Raises:
    ValueError: another form, or an argument that is not a literal.
  """
  head, parenthesis, _ = text.partition("(")
  source, colon, name = head.strip().rpartition(":")
  if not colon:
    looks_like_source = "." in name or "/" in name
    source, name = (name, "") if looks_like_source else ("", name)
  if (name and not name.isidentifier()) or (parenthesis and not name):
    raise ValueError(f"{text!r} names no function; {_FORMS}")
  args, kwargs = _arguments(text, text[len(head) :]) if parenthesis else ((), None)
  return CallString(source=source or None, name=name or None, args=args, kwargs=kwargs)


def _arguments(text: str, call: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
  try:
    node = ast.parse(f"f{call.strip()}", mode="eval").body
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
      raise ValueError("it is not a call")
    if any(keyword.arg is None for keyword in node.keywords):
      raise ValueError("** is not supported")
    args = tuple(_literal(arg) for arg in node.args)
    kwargs = {str(k.arg): _literal(k.value) for k in node.keywords}
  except (ValueError, SyntaxError) as error:
    raise ValueError(
      f"{text!r} cannot be parsed ({error}); {_FORMS}, with literals as arguments"
    ) from error
  return args, kwargs


def _literal(node: ast.expr) -> Any:
  """Returns the value of a literal.

  A bare name is a string, because shells and YAML remove quotes:
  `numeric_match(column=answer)`.
  """
  return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)


def load(call: CallString) -> Callable[..., Any]:
  """Returns the function that a call string with a source names.

  Modules in the current folder are found too.

  Raises:
    FileNotFoundError: the file does not exist.
    ImportError: the module does not exist or cannot be imported.
    ValueError: the module has no such function.
  """
  assert call.source is not None and call.name is not None
  module = load_module(call.source)
  function = getattr(module, call.name, None)
  if not callable(function):
    names = [
      n for n, v in vars(module).items() if callable(v) and not n.startswith("_")
    ]
    raise ValueError(
      f"{call.source} has no function {call.name!r}; it has {names or 'none'}"
    )
  return function


def load_module(source: str) -> ModuleType:
  """Imports a module by its name or its file.

  Raises:
    FileNotFoundError: the file does not exist.
    ImportError: the module does not exist or cannot be imported.
  """
  here = os.getcwd()
  if not source.endswith(".py"):
    if here not in sys.path:
      sys.path.append(here)  # last, so that a file here hides no installed package
    return _imported(source, source)
  path = pathlib.Path(source).expanduser().absolute()
  if not path.is_file():
    raise FileNotFoundError(f"{source!r}: no such file; give a file of Python source")
  # Worker processes that get the folder in their path find the module by its name.
  folder = str(path.parent)
  if folder not in sys.path:
    sys.path.append(folder)
  module = _imported(path.stem, source)
  if pathlib.Path(module.__file__ or "") != path:
    raise ImportError(
      f"{source} has the name of the module {module.__name__!r} in {module.__file__}; "
      "rename the file"
    )
  return module


def _imported(name: str, source: str) -> ModuleType:
  try:
    return importlib.import_module(name)
  except SyntaxError as error:  # in this file, or in one that it imports
    raise ImportError(
      f"{source} cannot be imported (SyntaxError in {error.filename}:{error.lineno}: "
      f"{error.msg}); correct that line"
    ) from error
  except Exception as error:  # the user's module may raise anything
    raise ImportError(
      f"{source} cannot be imported ({type(error).__name__}: {error}); run `python` on "
      "it to see the line. A module may also lie in the current folder"
    ) from error


def source_digest(call: CallString) -> str:
  """Returns the SHA-256 of the file of the function's module; "" without a file."""
  file = None if call.source is None else load_module(call.source).__file__
  if file is None:
    return ""
  return hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest()


def with_absolute_path(text: str) -> str:
  """Returns a call string with the absolute path of its file, if it names one."""
  source, colon, call = text.partition(".py:")
  path = pathlib.Path(source).expanduser().absolute()
  return f"{path}{colon}{call}" if colon else text
