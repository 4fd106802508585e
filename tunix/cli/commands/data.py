"""`tunix data`: shows and checks the data of a run, without a model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from tunix.cli import config as config_lib
from tunix.cli.commands.parts import data_file
from tunix.cli.make import data as build_data, loading
from tunix.data import show
from tunix.rl.pipeline import PROMPTS
from tunix.utils import terminal

HELP = """\
usage: tunix data show RECORDS[,RECORDS] [--rows N] [--model FOLDER]
                       [--tokenizer FOLDER] [--columns '{prompt: question}']
       tunix data show CONFIG[,CONFIG] [--rows N] [--KEY.SUB=VALUE ...]
       tunix data scan CONFIG[,CONFIG] [--KEY.SUB=VALUE ...]

show RECORDS: prints the format of a file (JSON, JSON lines, CSV, parquet, ArrayRecord,
      hf:ORG/NAME), the form of its records with the keys that identify the form, the
      jobs that take them, and the first records. --model or --tokenizer prints tokens.
show CONFIG: prints the first batch as text. dpo, orpo, kto and reward show prompts with
      their completions; grpo and ppo show prompts with the columns that reward
      functions receive. Trained or scored text stands between « and ».
scan CONFIG: checks and tokenizes every record, and prints counts.
CONFIG and keys are those of `tunix train`; the weights of a model are never loaded."""

_ROWS = 4


def main(argv: Sequence[str]) -> None:
  """Runs `tunix data show` and `tunix data scan`.

  Raises:
    ValueError: an unknown action, or invalid settings or records.
  """
  if not argv or "--help" in argv or "-h" in argv:
    print(HELP)
    return
  action, rest = argv[0], list(argv[1:])
  if action not in _ACTIONS:
    raise ValueError(f"`tunix data {action}` is unknown; use {' or '.join(_ACTIONS)}")
  _ACTIONS[action](rest)


def _show(argv: list[str]) -> None:
  arguments = config_lib.parse_arguments(argv)
  rows = _rows(arguments)
  others = [(key, text) for key, text in arguments.overrides if key != "rows"]
  if arguments.files and data_file.is_data(arguments.files[0]):
    data_file.show_files(arguments.files, others, rows)
    return
  for name in arguments.files:
    data_file.check_config(name)
  config = config_lib.load(
    [*arguments.files, *(f"--{key}={text}" for key, text in others)]
  )
  tokenizer = loading.ModelLoader(config).tokenizer()
  records = build_data.open_records(config)["train"]
  records.validate()
  with build_data.naming(config.row_keys(records.kind)):
    batch = next(iter(build_data.batches(config, tokenizer, records, training=True)))
  colour = sys.stdout.isatty()
  if PROMPTS in batch:
    print(terminal.shown(show.describe_prompts(batch, rows=rows)))
    return
  if "prompt_ids" in batch:
    text = show.describe_completions(batch, tokenizer, rows=rows, colour=colour)
    print(terminal.shown(text))
    return
  text = show.describe_batch(batch, tokenizer, rows=rows, colour=colour)
  print(terminal.shown(text))
  show.check_supervision(batch)


def _scan(argv: list[str]) -> None:
  config = config_lib.load(argv)
  tokenizer = loading.ModelLoader(config).tokenizer()
  records = build_data.open_records(config)
  reports = build_data.scan_records(config, tokenizer, records)
  for name, report in reports.items():
    print(f"{name}: {report}")


def _rows(arguments: config_lib.Arguments) -> int:
  """Returns the value of --rows."""
  rows = [text for key, text in arguments.overrides if key == "rows"] or [str(_ROWS)]
  if not rows[-1].isdigit() or int(rows[-1]) < 1:
    raise ValueError(f"--rows is {rows[-1]!r}; expected a whole number of at least 1")
  return int(rows[-1])


_ACTIONS: dict[str, Callable[[list[str]], None]] = {"show": _show, "scan": _scan}
