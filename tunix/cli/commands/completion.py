"""`tunix completion SHELL`: a script that completes commands, keys and jobs.

The words are those of the tables that the command itself reads.
"""

from __future__ import annotations

from collections.abc import Sequence

from tunix.cli import config as config_lib, main as command
from tunix.cli.commands.arguments import Parser
from tunix.cli.jobs.table import JOBS

_FLAGS = ("--help", "--schema", "--dry-run", "--tiny", "--print-config", "--config")

_BASH = """\
# bash: source <(tunix completion bash)
_tunix() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{commands}"
  else
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  case "${{COMPREPLY[0]}}" in *=) compopt -o nospace ;; esac
}}
complete -o default -F _tunix tunix
"""
_ZSH = """\
#compdef tunix
# zsh: source <(tunix completion zsh), behind compinit
_tunix() {{
  if (( CURRENT == 2 )); then
    compadd -- {commands}
    return
  fi
  case "$words[2]" in
{cases}
  esac
  _files
}}
compdef _tunix tunix
"""


def main(argv: Sequence[str]) -> None:
  """Runs `tunix completion`.

  Raises:
    ValueError: a shell that is not known.
  """
  parser = Parser("tunix completion", "prints a script that completes its commands")
  parser.add_argument("shell", metavar="SHELL", help=", ".join(SHELLS))
  args = parser.parse_args(argv)
  if args.shell not in SHELLS:
    raise ValueError(f"the shell {args.shell!r} is unknown: use {' or '.join(SHELLS)}")
  print(SHELLS[args.shell](), end="")


def _words() -> dict[str, list[str]]:
  """{command: words that may follow it}, of commands that have a table of them."""
  keys = [f"--{key}=" for key in _keys()]
  return {
    "train": [*_FLAGS, *keys],
    "data": ["show", "scan", *keys],
    "init": [*JOBS, "--output"],
    "completion": list(SHELLS),
  }


def _keys() -> list[str]:
  known = config_lib.known_keys()
  return [key for key in known if not any(k.startswith(f"{key}.") for k in known)]


def _bash() -> str:
  cases = [
    f'      {name}) words="{" ".join(words)}" ;;' for name, words in _words().items()
  ]
  return _BASH.format(commands=" ".join(command.COMMANDS), cases="\n".join(cases))


def _zsh() -> str:
  cases = []
  for name, words in _words().items():
    open_ended = [word for word in words if word.endswith("=")]
    whole = [word for word in words if not word.endswith("=")]
    parts = [f"compadd -- {' '.join(whole)}"]
    # No space behind a key: its value follows.
    parts += [f"compadd -S '' -- {' '.join(open_ended)}"] * bool(open_ended)
    cases.append(f"    {name}) {'; '.join(parts)} ;;")
  return _ZSH.format(commands=" ".join(command.COMMANDS), cases="\n".join(cases))


def _fish() -> str:
  lines = ["# fish: tunix completion fish | source"]
  for name, (_, what) in command.COMMANDS.items():
    text = what.replace("'", "\\'")
    lines.append(f"complete -c tunix -n __fish_use_subcommand -a {name} -d '{text}'")
  for name, words in _words().items():
    here = f"complete -c tunix -n '__fish_seen_subcommand_from {name}'"
    for word in words:
      if word.startswith("--"):
        more = " -r" if word.endswith("=") or word == "--output" else ""
        lines.append(f"{here} -l {word.strip('-=')}{more}")
      else:
        lines.append(f"{here} -a {word}")
  return "\n".join(lines) + "\n"


SHELLS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
