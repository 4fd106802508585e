"""A tool that runs shell commands in a jail."""

from __future__ import annotations

from collections.abc import Mapping

from tunix.rl.env.tools.results import ToolResult, of_jail
from tunix.sandbox.jail import Jail, JailSettings


class ShellTool:
  """Runs each command in a new shell, with an empty working folder.

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
      files: texts of files that each command finds in its working folder, by path.
    """
    self.jail, self._files = Jail(settings), dict(files or {})

  def shell(self, command: str) -> ToolResult:
    """Runs a command in a new shell and returns what it prints.

    Each command begins in the same folder with the same files. It cannot use the
    network.

    Args:
      command: The command, for the shell sh.

    Returns:
      The printed text and the error messages.
    """
    return of_jail(self.jail.run(["/bin/sh", "-c", command], files=self._files))
