"""A tool that runs Python programs in a jail."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from tunix.rl.env.tools.results import ToolResult, of_jail
from tunix.sandbox.jail import Jail, JailSettings

_FILE = "main.py"


class PythonTool:
  """Runs each program in a new process, with an empty working folder.

  Nothing is kept between two calls: no variables, files or processes.

  Attributes:
    jail: the jail, which rewards may use as well: `tool.jail.run` gives the exit code.
  """

  def __init__(
    self, settings: JailSettings | None = None, files: Mapping[str, str] | None = None
  ):
    """Initializes the tool without starting a process.

    Args:
      settings: limits of each call.
      files: texts of files that each program finds in its working folder, by path.

    Raises:
      ValueError: `files` has the name of the program, `main.py`.
    """
    if _FILE in (files or {}):
      raise ValueError(f"files has {_FILE!r}, the name of the program; rename the file")
    self.jail, self._files = Jail(settings), dict(files or {})

  def python(self, code: str) -> ToolResult:
    """Runs a Python program and returns what it prints.

    Each program runs in a new process. It cannot use the network.

    Args:
      code: The program. It must print its results.

    Returns:
      The printed text and the error messages.
    """
    argv = [sys.executable, "-s", _FILE]
    return of_jail(self.jail.run(argv, files={**self._files, _FILE: code}))
