"""`tunix data`: what a run would train on, without a model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from tunix.cli import config as config_lib
from tunix.cli.build import build, data as build_data
from tunix.cli.commands import data_file
from tunix.data import show
from tunix.rl.pipeline import PROMPTS

HELP = """\
usage: tunix data show RECORDS[,RECORDS] [--rows N] [--model FOLDER]
                       [--tokenizer FOLDER] [--columns '{prompt: question}']
       tunix data show CONFIG[,CONFIG] [--rows N] [--KEY.SUB=VALUE ...]
       tunix data scan CONFIG[,CONFIG] [--KEY.SUB=VALUE ...]

show: of a file of records (JSON, JSON lines, CSV, parquet, ArrayRecord, hf:ORG/NAME)
      its format, the form of its records and the keys by which that is known, the jobs
      that take them, and the first of them; with --model or --tokenizer as tokens.
      Of a configuration the first batch as text; for dpo, orpo, kto and reward prompts
      with their completions; for grpo and ppo the prompts, with the columns that reward
      functions see. What is trained or scored stands between « and ».
scan: checks and tokenises every record, and counts.
Configurations and keys are those of `tunix train`; a model is never loaded."""

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
  arguments = config_lib.parse_arguments(argv)
  rows = _rows(arguments)
  others = [(key, text) for key, text in arguments.overrides if key != "rows"]
  if arguments.files and data_file.is_data(arguments.files[0]):
    data_file.show_files(arguments.files, others, rows)
    return
  config = config_lib.load(
    [*arguments.files, *(f"--{key}={text}" for key, text in others)]
  )
  tokenizer = build.build_tokenizer(config)
  records = build_data.open_records(config)["train"]
  records.validate()
  with build_data.naming(config.row_keys(records.kind)):
    batch = next(iter(build_data.batches(config, tokenizer, records, training=True)))
  colour = sys.stdout.isatty()
  if PROMPTS in batch:
    print(show.describe_prompts(batch, rows=rows))
    return
  if "prompt_ids" in batch:
    print(show.describe_completions(batch, tokenizer, rows=rows, colour=colour))
    return
  print(show.describe_batch(batch, tokenizer, rows=rows, colour=colour))
  show.check_supervision(batch)


def _scan(argv: list[str]) -> None:
  config = config_lib.load(argv)
  tokenizer = build.build_tokenizer(config)
  records = build_data.open_records(config)
  reports = build_data.scan_records(config, tokenizer, records)
  for name, report in reports.items():
    print(f"{name}: {report}")


def _rows(arguments: config_lib.Arguments) -> int:
  """What --rows says."""
  rows = [text for key, text in arguments.overrides if key == "rows"] or [str(_ROWS)]
  if not rows[-1].isdigit() or int(rows[-1]) < 1:
    raise ValueError(f"--rows is {rows[-1]!r}: give a whole number from 1 up")
  return int(rows[-1])


_ACTIONS: dict[str, Callable[[list[str]], None]] = {"show": _show, "scan": _scan}
