"""`tunix data`: what a run would train on, without a model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from tunix.cli import build, build_data, config as config_lib
from tunix.cli.schema import Config
from tunix.data import supervision

HELP = """\
usage: tunix data show FILE[,FILE] [--rows N] [--KEY.SUB=VALUE ...]
       tunix data scan FILE[,FILE] [--KEY.SUB=VALUE ...]

show: the first batch as text, with the tokens that are trained between « and ».
scan: checks and tokenises every record, and counts.
The files and keys are those of `tunix train`; the model is not loaded."""

_ROWS = 4


def main(argv: Sequence[str]) -> None:
  """Runs `tunix data show` and `tunix data scan`.

  Raises:
    ValueError: an unknown action, or something is wrong with settings or records.
  """
  if not argv or "--help" in argv or "-h" in argv:
    print(HELP)
    return
  action, rest = argv[0], list(argv[1:])
  if action not in _ACTIONS:
    raise ValueError(f"`tunix data {action}` is unknown: use {' or '.join(_ACTIONS)}")
  _ACTIONS[action](rest)


def _show(argv: list[str]) -> None:
  rows, rest = _take_rows(argv)
  config = config_lib.load(rest)
  tokenizer = build.build_tokenizer(config)
  records = build_data.open_records(config)["train"]
  records.validate()
  batch = next(iter(build_data.batches(config, tokenizer, records, training=True)))
  colour = sys.stdout.isatty()
  print(supervision.describe_batch(batch, tokenizer, rows=rows, colour=colour))
  supervision.check_supervision(batch)


def _scan(argv: list[str]) -> None:
  config: Config = config_lib.load(argv)
  tokenizer = build.build_tokenizer(config)
  records = build_data.open_records(config)
  for name, report in build_data.scan_records(config, tokenizer, records).items():
    print(f"{name}: {report}")


def _take_rows(argv: list[str]) -> tuple[int, list[str]]:
  """(--rows, the other arguments)."""
  arguments = config_lib.parse_arguments(argv)
  rows = [text for key, text in arguments.overrides if key == "rows"] or [str(_ROWS)]
  if not rows[-1].isdigit() or int(rows[-1]) < 1:
    raise ValueError(f"--rows is {rows[-1]!r}: give a whole number from 1 up")
  others = [f"--{key}={text}" for key, text in arguments.overrides if key != "rows"]
  return int(rows[-1]), [*arguments.files, *others]


_ACTIONS: dict[str, Callable[[list[str]], None]] = {"show": _show, "scan": _scan}
