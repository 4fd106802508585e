"""`tunix report`: the HTML page of one run or several, which each run also writes."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from tunix.cli.commands.parts.arguments import Parser
from tunix.cli.run.folder import RunFolder
from tunix.cli.settings import keys
from tunix.report import page
from tunix.report.page import Run
from tunix.utils import io, terminal

_DESCRIPTION = """\
writes one HTML file with the curves, configuration, data, environment and samples of a
run, or of several runs drawn over each other; the file works without a network"""


def main(argv: Sequence[str]) -> None:
  """Runs `tunix report`.

  Raises:
    FileNotFoundError: a folder does not exist, or holds no run.
    ValueError: too many runs.
    OSError: the page cannot be written.
  """
  args = parser().parse_args(argv)
  folders = [pathlib.Path(name).expanduser() for name in args.runs]
  for folder in folders:
    _check(folder)
  here = folders[0] if len(folders) == 1 else pathlib.Path()
  output = here / page.NAME
  if args.output is not None:
    output = pathlib.Path(args.output).expanduser()
  if output.is_dir():
    raise ValueError(f"--output is {str(output)!r}, a folder; name a file in it")
  names = _names(folders)
  write(output, [read(folder, name) for folder, name in zip(folders, names)])
  print(f"written to {output}")


def write(output: pathlib.Path, runs: Sequence[Run]) -> None:
  """Writes the page of some runs.

  Raises:
    OSError: the page cannot be written; an earlier page is unchanged.
  """
  io.write_atomic(output, page.render(runs).encode())


def parser() -> Parser:
  """Returns the parser of the arguments."""
  made = Parser("tunix report", _DESCRIPTION)
  made.add_argument(
    "runs",
    nargs="+",
    metavar="RUN",
    help="output_dir of a run, or log_dir of a trainer",
  )
  made.add_argument(
    "--output",
    metavar="FILE",
    help=f"default: {page.NAME}, in the run's folder for one run, else here",
  )
  return made


def read(folder: pathlib.Path, name: str) -> Run:
  """Reads a run's folder for its page; files that cannot be read become notes."""
  run, notes = RunFolder(folder), []
  settings, defaults = None, {}
  if run.config_file.is_file():
    try:
      config = run.read_config()
      settings, defaults = keys.flatten(config), keys.defaults(config)
    except (OSError, ValueError) as error:
      notes.append(f"config.yaml cannot be read, so the page lacks it: {error}")
  result = _json(run.result_file)
  return Run(
    name=name,
    folder=folder,
    settings=settings,
    defaults=defaults,
    about=_json(run.about_file),
    scans={k: v for k, v in run.scans().items() if "report" in v},
    ended=_ended(result),
    failure=_json(run.failure_file).get("error"),
    notes=[*notes, *map(str, result.get("notes") or ())],
  )


def _check(folder: pathlib.Path) -> None:
  places = ("config.yaml", "logs/metrics.jsonl", "metrics.jsonl")
  if not any((folder / place).is_file() for place in places):
    problem = "holds no run" if folder.is_dir() else "is not a folder"
    raise FileNotFoundError(
      f"{folder} {problem}; give the output_dir of a `tunix train`, or a folder with "
      "metrics.jsonl"
    )


def _names(folders: Sequence[pathlib.Path]) -> list[str]:
  """Returns short names of the folders, all of them different."""
  names = [folder.resolve().name or str(folder) for folder in folders]
  if len(set(names)) < len(names):
    names = [str(folder) for folder in folders]
  return [
    name if names.count(name) == 1 else f"{name} ({i})"
    for i, name in enumerate(names, start=1)
  ]


def _json(file: pathlib.Path) -> dict[str, Any]:
  """Returns the JSON object of a file; {} if the file is missing or damaged."""
  with contextlib.suppress(OSError, ValueError, RecursionError):
    value = json.loads(file.read_bytes())
    return value if isinstance(value, dict) else {}
  return {}


def _ended(result: dict[str, Any]) -> str | None:
  """Returns a phrase about how a run ended; None if the result file is missing."""
  if "steps" not in result:
    return None
  lists = {k: v for k, v in result.items() if isinstance(v, list) and k != "notes"}
  pairs = {k.replace("_", " "): v for k, v in lists.items()}
  changes = [f"{k} {v[0]:.4g} -> {v[-1]:.4g}" for k, v in pairs.items()]
  steps = terminal.counted(result["steps"], "step")
  early = ", stopped early" if result.get("ended_by") == "early_stopping" else ""
  return "; ".join([f"finished after {steps}{early}", *changes])
