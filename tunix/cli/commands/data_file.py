"""`tunix data show` of a file of records: what it holds, without a configuration."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tunix.cli import config as config_lib
from tunix.cli.build import data_sources, loading
from tunix.cli.jobs.table import JOBS
from tunix.cli.settings import yaml_text
from tunix.data import files, render, show
from tunix.data.recognise import Recognised, recognise
from tunix.data.records import PROMPTS, SFT, Kind
from tunix.data.stored import Records
from tunix.generate.tokenizer_adapter import TokenizerAdapter

_DATA = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", *files.ARRAY_RECORD)
# A configuration is small; a file of records may be larger than memory.
_LARGEST_CONFIG = 1 << 20
_LONGEST = 300  # characters of a record as it lies in its file

# Options, and the keys of a configuration that mean the same.
_OPTIONS = ("model", "tokenizer", "columns", "rows")
_KEYS = {
  "model.path": "model",
  "tokenizer.path": "tokenizer",
  "data.columns": "columns",
}


def is_data(name: str) -> bool:
  """Whether a word names records rather than a configuration.

  The end of the name says it. JSON may be either: it is a configuration where it is one
  object of our sections.
  """
  path = pathlib.Path(name).expanduser()
  if data_sources.is_address(name) or name.endswith(_DATA):
    return True
  if path.suffix in (".yaml", ".yml") or not path.is_file():
    return path.suffix == ".json"
  with path.open("rb") as file:
    text = file.read(_LARGEST_CONFIG + 1)
  if text.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] not in (b"{", b"["):
    return False
  try:
    value = json.loads(text)
  except ValueError:
    return True
  sections = {key.partition(".")[0] for key in config_lib.known_keys()}
  return not isinstance(value, dict) or not value.keys() <= sections


def show_files(
  names: Sequence[str], options: Sequence[tuple[str, str]], rows: int
) -> None:
  """Prints what files hold: format, form, and their first records.

  Args:
    names: of files, as `data.train` takes them.
    options: (name, value) as they were typed.
    rows: records of each file.

  Raises:
    FileNotFoundError, ImportError: no such file or tokenizer, or a package is missing.
    ValueError: an unknown option, or a record of no known form.
  """
  asked = {_KEYS.get(name, name): text for name, text in options}
  for name in asked:
    if name not in _OPTIONS:
      raise ValueError(
        f"--{name} is no option for a file of records, which takes "
        f"{', '.join(f'--{option}' for option in _OPTIONS)}: keys of a run go with "
        f"--data.train={names[0]}"
      )
  columns = _columns(asked.get("columns"))
  tokenizer = _tokenizer(asked.get("model"), asked.get("tokenizer"))
  if other := [name for name in names if not is_data(name)]:
    raise ValueError(
      f"{other[0]} is no file of records as {names[0]} is: show it alone"
    )
  for name in names:
    records = data_sources.open_records(name, SFT, columns=columns)
    for line in _lines(records, tokenizer, rows):
      print(line)


def _columns(text: str | None) -> Mapping[str, str]:
  value = yaml_text.parse(text, "--columns") if text else {}
  if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
    raise ValueError(
      f"--columns is {text!r}: expected names of records and of columns, such as "
      "'{prompt: question, response: answer}'"
    )
  return value


def _tokenizer(model: str | None, tokenizer: str | None) -> TokenizerAdapter | None:
  source = tokenizer or model
  if source is None:
    return None
  return loading.load_tokenizer(model or source, tokenizer=tokenizer)


def _lines(
  records: Records, tokenizer: TokenizerAdapter | None, rows: int
) -> Iterator[str]:
  count, shown = len(records), min(rows, len(records))
  yield f"{records.name}: {records.noun}, {count:,} record{'s' * (count != 1)}"
  before = None
  for index in range(shown):
    record, where = records.raw(index), records.where(index)
    known = _recognised(record, where)
    if known != before:
      yield _describe(known)
    before = known
    yield f"--- {where}\n{_shortened(record)}"
    if tokenizer is None:
      read = known.kind.read(record, where)
      yield show.describe_record(read, colour=sys.stdout.isatty())
    else:
      yield _rendered(record, known, tokenizer, where)
  if shown < count:
    yield f"... {count - shown:,} more"
  if tokenizer is None:
    yield "with --model=FOLDER (or --tokenizer=FOLDER): the tokens of each"


def _rendered(
  record: Any, known: Recognised, tokenizer: TokenizerAdapter, where: str
) -> str:
  try:
    rendered = render.render_record(record, known.kind, tokenizer, where=where)
  except ValueError as error:
    remedy = "name the folder of one that has with --tokenizer"
    text = str(error).replace("give one with chat_template=...", remedy)
    raise ValueError(text) from error
  names, colour = known.kind.completions, sys.stdout.isatty()
  return show.describe_rendered(rendered, names, tokenizer, colour=colour)


def _recognised(record: object, where: str) -> Recognised:
  try:
    return recognise(record, where)
  except ValueError as error:
    raise ValueError(
      f"{error}; other names are mapped by --columns='{{prompt: THEIRS, response: "
      "THEIRS}'"
    ) from error


def _describe(known: Recognised) -> str:
  keys = ", ".join(f'"{key}"' for key in known.keys)
  form = f"a record of {known.library}" if known.library else "a record of our own form"
  return f"by {keys}: {form}, for {_jobs_of(known.kind)}"


def _jobs_of(kind: Kind) -> str:
  """Names the jobs that train on records of a kind, such as "the jobs dpo and orpo"."""
  jobs = _names_of_jobs(kind)
  text = f"the job{'s' * (' ' in jobs)} {jobs}"
  return f"{text} ({_names_of_jobs(PROMPTS)} take its prompt)" if kind is SFT else text


def _names_of_jobs(kind: Kind) -> str:
  *others, last = [name for name, job in JOBS.items() if kind in job.records]
  return f"{', '.join(others)} and {last}" if others else last


def _shortened(record: object) -> str:
  text = json.dumps(record, ensure_ascii=False, default=repr)
  return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
