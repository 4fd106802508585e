"""`tunix report`: runs as a page, and the page that every run leaves in its folder."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from tunix.cli.commands.arguments import Parser
from tunix.cli.run.folder import RunFolder
from tunix.cli.settings import keys
from tunix.report import page
from tunix.report.page import Run
from tunix.utils import io

_DESCRIPTION = """\
writes runs as one HTML page that needs nothing besides itself: curves, configuration,
data, environment, samples; several runs are drawn over each other"""


def main(argv: Sequence[str]) -> None:
  """Runs `tunix report`.

  Raises:
    FileNotFoundError: a folder is not there, or holds no run.
    ValueError: too many runs.
    OSError: the page cannot be written.
  """
  parser = Parser("tunix report", _DESCRIPTION)
  parser.add_argument(
    "runs", nargs="+", metavar="RUN", help="output_dir of a run, or a trainer's log_dir"
  )
  parser.add_argument(
    "--output",
    metavar="FILE",
    help=f"default: {page.NAME} in the folder of one run, here for several",
  )
  args = parser.parse_args(argv)
  folders = [pathlib.Path(name).expanduser() for name in args.runs]
  for folder in folders:
    _check(folder)
  here = folders[0] if len(folders) == 1 else pathlib.Path()
  output = here / page.NAME
  if args.output is not None:
    output = pathlib.Path(args.output).expanduser()
  if output.is_dir():
    raise ValueError(f"--output is {str(output)!r}, a folder: name a file in it")
  names = _names(folders)
  write(output, [read(folder, name) for folder, name in zip(folders, names)])
  print(f"written to {output}")


def write(output: pathlib.Path, runs: Sequence[Run]) -> None:
  """Writes the page of some runs.

  Raises:
    OSError: it cannot be written; a page of before is untouched.
  """
  # A completion may hold half a surrogate pair, which UTF-8 has no bytes for.
  io.write_atomic(output, page.render(runs).encode("utf-8", "replace"))


def read(folder: pathlib.Path, name: str) -> Run:
  """What a page says of a run's folder; what cannot be read is said there."""
  run, notes = RunFolder(folder), []
  settings, defaults = None, {}
  if run.config_file.is_file():
    try:
      config = run.read_config()
      settings, defaults = keys.flatten(config), keys.defaults(config)
    except (OSError, ValueError) as error:
      notes.append(f"config.yaml cannot be read, so no configuration is shown: {error}")
  return Run(
    name=name,
    folder=folder,
    settings=settings,
    defaults=defaults,
    about=_json(run.about_file),
    scans={k: v for k, v in run.scans().items() if "report" in v},
    ended=_ended(_json(run.result_file)),
    failure=_json(run.failure_file).get("error"),
    notes=notes,
  )


def _check(folder: pathlib.Path) -> None:
  places = ("config.yaml", "logs/metrics.jsonl", "metrics.jsonl")
  if not any((folder / place).is_file() for place in places):
    what = "holds no run" if folder.is_dir() else "is no folder"
    raise FileNotFoundError(
      f"{folder} {what}: give the output_dir of a `tunix train`, or a folder with "
      "metrics.jsonl"
    )


def _names(folders: Sequence[pathlib.Path]) -> list[str]:
  """Short names of folders, each another."""
  names = [folder.resolve().name or str(folder) for folder in folders]
  if len(set(names)) < len(names):
    names = [str(folder) for folder in folders]
  return [
    name if names.count(name) == 1 else f"{name} ({i})"
    for i, name in enumerate(names, start=1)
  ]


def _json(file: pathlib.Path) -> dict[str, Any]:
  """A file's object; empty where it is missing or damaged."""
  with contextlib.suppress(OSError, ValueError):
    value = json.loads(file.read_bytes())
    return value if isinstance(value, dict) else {}
  return {}


def _ended(result: dict[str, Any]) -> str | None:
  """How a run ended, in words: its result file says it; None: there is none."""
  if "steps" not in result:
    return None
  pairs = {k.replace("_", " "): v for k, v in result.items() if isinstance(v, list)}
  changes = [f"{k} {v[0]:.4g} -> {v[-1]:.4g}" for k, v in pairs.items()]
  early = ", stopped early" if result.get("ended_by") == "early_stopping" else ""
  return "; ".join([f"finished after {result['steps']:,} steps{early}", *changes])
