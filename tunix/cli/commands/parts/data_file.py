"""`tunix data show RECORDS`: the contents of a file, without a configuration."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tunix.cli import config as config_lib
from tunix.cli.jobs.table import JOBS
from tunix.cli.make import data_sources, model_folders
from tunix.cli.settings import yaml_text
from tunix.data import chat, render, show
from tunix.data.images import ImageReader
from tunix.data.reading import files
from tunix.data.reading.recognize import Recognized, recognize
from tunix.data.reading.stored import Records
from tunix.data.records import PROMPTS, SFT, Kind
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.utils import terminal

_DATA = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", *files.ARRAY_RECORD)
# A configuration is small; a file of records may be larger than memory.
_LARGEST_CONFIG = 1 << 20
_LONGEST = 300  # characters of a record's JSON that are printed

# Options, and keys of a configuration with the same meaning.
_OPTIONS = ("model", "tokenizer", "columns", "rows")
_KEYS = {
  "model.path": "model",
  "tokenizer.path": "tokenizer",
  "data.columns": "columns",
}


def is_data(name: str) -> bool:
  """Returns True if an argument names records, and False for a configuration.

  The suffix decides, except for JSON: a JSON file is a configuration if it holds one
  object whose keys are sections of a configuration.
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
  except (ValueError, RecursionError):
    return True
  return not isinstance(value, dict) or not value.keys() <= _sections()


def _sections() -> set[str]:
  return {key.partition(".")[0] for key in config_lib.known_keys()}


def check_config(name: str) -> None:
  """Refuses a file that is no configuration, and that its name does not call YAML.

  Raises:
    ValueError: names the file and the formats that can be shown.
  """
  path = pathlib.Path(name).expanduser()
  if path.suffix in (".yaml", ".yml") or not path.is_file():
    return  # reading it as a configuration gives the error
  cause, keys = None, None
  try:
    keys = yaml_text.read_file(name)
  except ValueError as error:
    cause = error
  if keys is None or (keys and not keys.keys() & _sections()):
    raise ValueError(
      f"{name} is neither a file of records nor a configuration; expected "
      f"{', '.join((*_DATA, '.json'))} or .yaml. Give a file in one of these formats."
    ) from cause


def show_files(
  names: Sequence[str], options: Sequence[tuple[str, str]], rows: int
) -> None:
  """Prints the format, the form and the first records of files.

  Args:
    names: names of files, as in `data.train`.
    options: (name, text of the value), as on the command line.
    rows: number of records of each file.

  Raises:
    FileNotFoundError, ImportError: no such file or tokenizer, or a package is missing.
    ValueError: an unknown option, or a record of no known form.
  """
  values = {_KEYS.get(name, name): text for name, text in options}
  for name in values:
    if name not in _OPTIONS:
      raise ValueError(
        f"--{name} is no option for a file of records; expected "
        f"{', '.join(f'--{option}' for option in _OPTIONS)}. To show a run with this "
        f"key, write --data.train={names[0]}"
      )
  columns = _columns(values.get("columns"))
  tokenizer, source = None, values.get("tokenizer") or values.get("model")
  images = None
  if "model" in values:
    images = model_folders.image_reader(values["model"], True)
  if source is not None:
    model = values.get("model") or source
    tokenizer = model_folders.load_tokenizer(model, tokenizer=values.get("tokenizer"))
  if other := [name for name in names if not is_data(name)]:
    raise ValueError(
      f"{other[0]} is a configuration and {names[0]} is a file of records; show one "
      "of them"
    )
  for name in names:
    records = data_sources.open_records(name, SFT, columns=columns)
    for line in _lines(records, tokenizer, rows, images):
      print(terminal.shown(line))


def _columns(text: str | None) -> Mapping[str, str]:
  value = yaml_text.parse(text, "--columns") if text else {}
  if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
    raise ValueError(
      f"--columns is {text!r}; expected keys of records with names of columns, such as "
      "'{prompt: question, response: answer}'"
    )
  return value


def _lines(
  records: Records,
  tokenizer: TokenizerAdapter | None,
  rows: int,
  images: ImageReader | None,
) -> Iterator[str]:
  count, shown = len(records), min(rows, len(records))
  yield f"{records.name}: {records.noun}, {terminal.counted(count, 'record')}"
  before = None
  for index in range(shown):
    record, where = records.raw(index), records.where(index)
    form = _recognized(record, where)
    if form != before:
      yield _describe(form)
    before = form
    yield f"--- {where}\n{_shortened(record, where)}"
    if tokenizer is None:
      read = form.kind.read(record, where)
      yield show.describe_record(read, colour=sys.stdout.isatty())
    else:
      options = {"where": where, "images": images, "folder": records.folder_of(index)}
      yield _rendered(record, form, tokenizer, **options)
  if shown < count:
    yield f"... {count - shown:,} more"
  if tokenizer is None:
    yield "--model=FOLDER or --tokenizer=FOLDER shows the tokens of each record"


def _rendered(
  record: Any, form: Recognized, tokenizer: TokenizerAdapter, **options: Any
) -> str:
  try:
    rendered = render.render_record(record, form.kind, tokenizer, **options)
  except ValueError as error:
    # The error is for Python callers; this command has an option instead.
    remedy = "name a tokenizer that has one with --tokenizer"
    text = str(error).replace("give one with chat_template=...", remedy)
    raise ValueError(text) from error
  names, colour = form.kind.completions, sys.stdout.isatty()
  return show.describe_rendered(rendered, names, tokenizer, colour=colour)


def _recognized(record: object, where: str) -> Recognized:
  try:
    return recognize(record, where)
  except ValueError as error:
    raise ValueError(
      f"{error}; map other names by --columns='{{prompt: NAME, response: NAME}}'"
    ) from error


def _describe(known: Recognized) -> str:
  keys = ", ".join(f'"{key}"' for key in known.keys)
  form = known.library or "tunix"
  return f"keys {keys}: the form of {form}, for {_jobs_of(known.kind)}"


def _jobs_of(kind: Kind) -> str:
  """Names the jobs that train on records of a kind, such as "the jobs dpo and orpo"."""
  jobs = _names_of_jobs(kind)
  text = f"the job{'s' * (' ' in jobs)} {jobs}"
  return f"{text} ({_names_of_jobs(PROMPTS)} take its prompt)" if kind is SFT else text


def _names_of_jobs(kind: Kind) -> str:
  *others, last = [name for name, job in JOBS.items() if kind in job.records]
  return f"{', '.join(others)} and {last}" if others else last


def _shortened(record: object, where: str) -> str:
  text = json.dumps(record, ensure_ascii=False, default=repr)
  try:
    chat.check_unicode(text)
  except ValueError as error:
    raise ValueError(f"{where}: {error}") from error
  return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
