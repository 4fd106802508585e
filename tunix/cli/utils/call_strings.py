"""Functions named in configurations: "pkg.mod:fn", "/path/file.py:fn(name=1)".

Arguments are literals, read with `ast`: nothing of a string is evaluated.
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
  """A string taken apart.

  Attributes:
    source: module or file; None: only a name was given.
    name: of the function; None: only a source was given.
    args, kwargs: of the call; None: there are no parentheses.
  """

  source: str | None
  name: str | None
  args: tuple[Any, ...] = ()
  kwargs: dict[str, Any] | None = None


def parse_call_string(text: str) -> CallString:
  """Takes "source:name(args)" apart; source, name or the call may be missing.

  Raises:
    ValueError: no such form, or an argument that is no literal.
  """
  head, parenthesis, _ = text.partition("(")
  source, colon, name = head.strip().rpartition(":")
  if not colon:
    looks_like_source = "." in name or "/" in name
    source, name = (name, "") if looks_like_source else ("", name)
  if (name and not name.isidentifier()) or (parenthesis and not name):
    raise ValueError(f"{text!r} names no function: {_FORMS}")
  args, kwargs = _arguments(text, text[len(head) :]) if parenthesis else ((), None)
  return CallString(source=source or None, name=name or None, args=args, kwargs=kwargs)


def _arguments(text: str, call: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
  try:
    node = ast.parse(f"f{call.strip()}", mode="eval").body
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
      raise ValueError("it is no call")
    if any(keyword.arg is None for keyword in node.keywords):
      raise ValueError("** is not read")
    args = tuple(_literal(arg) for arg in node.args)
    kwargs = {str(k.arg): _literal(k.value) for k in node.keywords}
  except (ValueError, SyntaxError) as error:
    raise ValueError(
      f"{text!r} cannot be read ({error}): {_FORMS}, with literals as arguments"
    ) from error
  return args, kwargs


def _literal(node: ast.expr) -> Any:
  """The value of a literal; a bare name is text, because shells and YAML eat quotes:
  numeric_match(column=answer)."""
  return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)


def load(call: CallString) -> Callable[..., Any]:
  """The function that a call string with a source names.

  Modules are looked for in the current folder as well.

  Raises:
    FileNotFoundError: no such file.
    ImportError: no such module.
    ValueError: it has no such function.
  """
  assert call.source is not None and call.name is not None
  module = load_module(call.source)
  function = getattr(module, call.name, None)
  if not callable(function):
    known = [
      n for n, v in vars(module).items() if callable(v) and not n.startswith("_")
    ]
    raise ValueError(
      f"{call.source} has no function {call.name!r}: there are {known or 'none'}"
    )
  return function


def load_module(source: str) -> ModuleType:
  """A module by its name, or by its file.

  Raises:
    FileNotFoundError: no such file.
    ImportError: no such module, or one that cannot be imported.
  """
  here = os.getcwd()
  if not source.endswith(".py"):
    if here not in sys.path:
      sys.path.append(here)  # behind all else: a file here must not hide a package
    return _imported(source, source)
  path = pathlib.Path(source).expanduser().absolute()
  if not path.is_file():
    raise FileNotFoundError(f"{source!r}: no such file; give a file of Python source")
  # By its place: worker processes that get the folder in their path find it by name.
  folder = str(path.parent)
  if folder not in sys.path:
    sys.path.append(folder)
  module = _imported(path.stem, source)
  if pathlib.Path(module.__file__ or "") != path:
    raise ImportError(
      f"{source} is called like the module {module.__name__!r} of "
      f"{module.__file__}: give the file another name"
    )
  return module


def _imported(name: str, source: str) -> ModuleType:
  try:
    return importlib.import_module(name)
  except SyntaxError as error:  # of this file, or of one that it imports
    raise ImportError(
      f"{source} cannot be imported (SyntaxError in {error.filename}:{error.lineno}: "
      f"{error.msg}): correct that line"
    ) from error
  except Exception as error:  # the user's module may raise anything
    raise ImportError(
      f"{source} cannot be imported ({type(error).__name__}: {error}): run "
      "`python` on it to see where; a module is looked for in the current folder too"
    ) from error


def source_digest(call: CallString) -> str:
  """SHA-256 of the file that the function's module was loaded from; "" without one."""
  file = None if call.source is None else load_module(call.source).__file__
  return (
    "" if file is None else hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest()
  )


def with_absolute_path(text: str) -> str:
  """The entry with the place of its file written out, if it names one."""
  source, colon, call = text.partition(".py:")
  return (
    f"{pathlib.Path(source).expanduser().absolute()}{colon}{call}" if colon else text
  )
