"""`tunix completion SHELL`: a script that completes commands, options and keys."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

import shtab

from tunix.cli import config as config_lib, main as command
from tunix.cli.commands.parts.arguments import Parser
from tunix.cli.jobs.table import JOBS

# Commands that take the keys of a configuration, and so have no argparse parser: their
# flags, and their options with a value.
_WITH_KEYS = {
  "train": (["help", "schema", "dry-run", "tiny", "print-config"], ["config"]),
  "plan": (["help", "fit", "json", "markdown"], ["config", "topology", "ship"]),
  "data": (["help"], ["config", "rows", "tokenizer", "columns"]),
}


def main(argv: Sequence[str]) -> None:
  """Runs `tunix completion`.

  Raises:
    ValueError: an unknown shell.
  """
  print(script(parser().parse_args(argv).shell), end="")


def parser() -> Parser:
  """Returns the parser of the arguments."""
  made = Parser(
    "tunix completion",
    "prints a script that completes commands, options and keys; bash: "
    "source <(tunix completion bash), fish: tunix completion fish | source",
  )
  made.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
  return made


def script(shell: str) -> str:
  """Returns the completion script of a shell."""
  root = argparse.ArgumentParser("tunix")
  commands = root.add_subparsers()
  for name, (module, summary) in command.COMMANDS.items():
    loaded = importlib.import_module(module, "tunix.cli.commands")
    parents = [loaded.parser()] if hasattr(loaded, "parser") else []
    made = commands.add_parser(name, help=summary, parents=parents, add_help=False)
    if name not in _WITH_KEYS:
      continue
    flags, options = _WITH_KEYS[name]
    for flag in flags:
      made.add_argument(f"--{flag}", action="store_true")
    keys = config_lib.known_keys()
    sections = {key.rpartition(".")[0] for key in keys}
    for key in (*options, *(key for key in keys if key not in sections)):
      choices = list(JOBS) if key == "job" else None
      made.add_argument(f"--{key}", choices=choices, metavar="VALUE")
    if name == "data":
      made.add_argument("action", choices=("show", "scan"))
    made.add_argument("files", nargs="*").complete = shtab.FILE  # pyright: ignore
  return shtab.complete(root, shell)
