"""`tunix init`: a commented configuration to start from.

The file has the keys that most people set first. With `--all` it has every key that
`tunix train --help` shows, which are the fields of the job's dataclasses.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tunix.cli import config as config_lib, reference
from tunix.cli.commands.parts.arguments import Parser
from tunix.cli.jobs.table import JOBS
from tunix.cli.settings import from_trl, keys, rates, yaml_text
from tunix.utils import io

# Keys that every job has and most people set first, with values to start from. A job
# adds its own as `Job.first_values`.
_FIRST: Mapping[str, Any] = {
  "output_dir": "out",
  "model.path": "my-model",
  "data.train": "train.jsonl",
  "lora.rank": 8,
  "training.global_batch_size": 8,
  "checkpoint.save_every_n_steps": 50,
}

# Keys of the length of a run; the first one that is reached ends it.
_LENGTHS = ("data.num_epochs", "training.max_steps")

_HEAD = """\
# tunix train --config {file}
#
# Job {job}. {keys}
# Arguments override: --training.learning_rate=1e-4.
# `tunix train --dry-run --config {file}` checks this file, the data and the model.
"""
_ALL = """\
A key with a comment sign has the value that is shown, its default; the
# lines above a key explain it."""
_FEW = """\
These keys are set most often; the lines above a key explain it.
# `tunix init {job} --all` and `tunix train --help --job={job}` show every key."""


def main(argv: Sequence[str]) -> None:
  """Runs `tunix init`.

  Raises:
    ValueError: an unknown job, key or value, or a file that exists.
  """
  args, rest = parser().parse_known_args(argv)
  arguments = config_lib.parse_arguments(rest)
  if arguments.files:
    raise ValueError(f"unrecognized arguments: {' '.join(arguments.files)}")
  file = pathlib.Path(args.output or f"{args.job}.yaml").expanduser()
  if file.exists():
    raise ValueError(f"--output is {file}, which exists; give the name of a new file")
  if not file.parent.is_dir():
    raise ValueError(
      f"--output is {file}; expected an existing folder. Make {file.parent} first"
    )
  first, left = {**_FIRST, **JOBS[args.job].first_values}, {}
  typed = dict(arguments.overrides)
  if typed.keys() & _LENGTHS:
    first = {key: value for key, value in first.items() if key not in _LENGTHS}
  if args.from_trl is not None:
    first, left = _of_trl(args.job, args.from_trl, typed)
  values = _values(args.job, first, typed)
  text = configuration(args.job, str(file), values, has_all=args.all)
  for name, advice in left.items():
    print(f"{args.from_trl}: {name}: {advice}")
  io.write_atomic(file, text.encode())
  next_step = f"`tunix train --dry-run --config {file}`"
  names = set(typed) | set(first if args.from_trl else ())
  if not {"model.path", "data.train"} <= names:
    next_step = f"set model.path and data.train, then {next_step}"
  print(f"wrote {file}: {next_step}")


def parser() -> Parser:
  """Returns the parser of the arguments that are no keys."""
  made = Parser(
    "tunix init",
    "writes a configuration with comments to start from; further arguments set keys of "
    "`tunix train`, such as --data.num_epochs=1",
  )
  made.add_argument("job", choices=list(JOBS))
  made.add_argument("--output", metavar="FILE", help="default: JOB.yaml")
  made.add_argument(
    "--all", action="store_true", help="writes every key, the others as comments"
  )
  made.add_argument(
    "--from-trl",
    metavar="FILE",
    help="translates a YAML file of `trl JOB --config`, and names what is left",
  )
  return made


def _of_trl(
  job: str, file: str, typed: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
  """Returns our keys for a file of TRL, and advice by option without a counterpart.

  Args:
    job: our job.
    file: the file.
    typed: texts of the command line by key; they override the file.

  Raises:
    FileNotFoundError, ValueError: the file is missing, or no YAML mapping; or `typed`
      is wrong.
  """
  known = {key for key, _, _ in keys.walk(JOBS[job].settings)}
  translation = from_trl.translate(job, yaml_text.read_file(file), known)
  values, left = dict(translation.values), dict(translation.left)
  while True:
    try:
      config_lib.load(_arguments(_texts(job, values, typed)))
      return values, left
    except ValueError as error:
      # The error names a key that the user did not write.
      key, _, problem = str(error).removeprefix("--").partition(": ")
      if key in typed or key not in values:
        raise
      del values[key]
      left[translation.names[key]] = f"left out, because {problem}"


def _texts(
  job: str, values: Mapping[str, Any], typed: Mapping[str, str]
) -> dict[str, str]:
  """Returns keys with their values as texts of a command line."""
  texts = {key: yaml_text.inline(value) for key, value in values.items()}
  return {"job": job} | texts | dict(typed)


def _arguments(texts: Mapping[str, str]) -> list[str]:
  return [f"--{key}={text}" for key, text in texts.items()]


def _values(
  job: str, given: Mapping[str, Any], typed: Mapping[str, str] | None = None
) -> dict[str, Any]:
  """Returns keys with their values, checked as `tunix train` does.

  Args:
    job: name of the job.
    given: values by key.
    typed: texts of the command line by key, which override `given`.
  """
  texts = _texts(job, given, typed or {})

  def load():
    return config_lib.load(_arguments(texts))

  config = load()
  if config.schedule.name is None and config.training.learning_rate is None:
    texts["training.learning_rate"] = rates.readable(rates.rate_of(config).default)
    config = load()
  settings, values = keys.as_plain(config), {}
  shown = {".".join(x.path) for x in reference.listing(job) if not x.is_section}
  for key in texts:
    path = key
    while path and path not in shown:  # a key of a mapping, such as optimizer.args.b2
      path = path.rpartition(".")[0]
    if not path:
      raise ValueError(
        f"{key} is a short spelling; give the key of `tunix train --help`"
      )
    value: Any = settings
    for part in path.split("."):
      value = (value or {}).get(part)
    if value is not None:
      values[path] = value
  return values


def configuration(
  job: str,
  file: str,
  values: Mapping[str, Any] | None = None,
  *,
  has_all: bool = True,
) -> str:
  """Returns the text of a configuration file.

  Args:
    job: name of the job.
    file: name of the file, for its first lines.
    values: keys that are set, with their values. None: the keys that most people set
      first.
    has_all: the other keys become comments; False leaves them out.
  """
  if values is None:
    values = _values(job, {**_FIRST, **JOBS[job].first_values})
  active = {key.partition(".")[0] for key in values}
  keys_shown = _ALL if has_all else _FEW.format(job=job)
  lines = [_HEAD.format(job=job, file=file, keys=keys_shown).rstrip()]
  for line in reference.listing(job):
    section, depth = line.path[0], len(line.path)
    key = ".".join(line.path)
    if not has_all and key not in (active if line.is_section else values):
      continue
    # A section without any set key is a comment too: an empty one means nothing.
    mark = "" if section in active else "# "
    indent = mark + "  " * (depth - 1)
    lines += [""] * (depth == 1)
    lines += reference.wrap(line.meaning, f"{indent}# " if depth > 1 else "# ")
    if line.is_section:
      lines.append(f"{indent}{line.path[-1]}:")
    elif key in values:
      lines.append(f"{indent}{line.path[-1]}: {yaml_text.inline(values[key])}")
    else:
      sign = "" if mark else "# "
      value = yaml_text.inline(line.value)
      lines.append(f"{indent}{sign}{line.path[-1]}: {value}")
  return "\n".join(lines) + "\n"
