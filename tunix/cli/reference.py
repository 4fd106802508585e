"""Writes the reference of the keys in three forms: help, YAML, JSON Schema.

Names, types, defaults and texts come from the dataclasses of the jobs.
`python -m tunix.cli.reference` writes `base_config()` to `base_config.yaml`.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable
from typing import Any

from tunix.cli.jobs.table import JOBS
from tunix.cli.settings import keys, rates, yaml_text
from tunix.cli.settings.convert import (
  BOOL,
  Choice,
  json_type,
  placeholder,
  plain,
  section_of,
  takes_null,
)
from tunix.cli.settings.keys import REQUIRED, Key, sentence
from tunix.cli.settings.spelling import did_you_mean

_WIDTH = 88

_HEAD = """\
# Every key of a run, with its default. Your own file needs only the keys that differ:
#
#   tunix train --config mine.yaml --training.max_steps=500
#
# Later files and arguments override key by key. `null` means "not set". If only some
# jobs (or algorithms) have a key, their names stand before a colon. `tunix train --help
# --job=JOB` shows the keys of one job.
# Made by `python -m tunix.cli.reference`.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
  """A key with all jobs that have it.

  Attributes:
    path: names from the section down.
    keys: the key by job; below an algorithm, by algorithm.
    section: True if the key is a section.
    chosen: True below a choice, where null means the default of the chosen class.
  """

  path: tuple[str, ...]
  keys: dict[str, Key]
  section: bool
  chosen: bool

  @property
  def key(self) -> Key:
    """The key of the first job."""
    return next(iter(self.keys.values()))

  @property
  def default(self) -> Any:
    """The default as YAML has it; None if it is required or differs between jobs."""
    if self.path == ("job",):
      return next(iter(self.keys))
    values = [
      None if key.default is REQUIRED or self.section else plain(key.default)
      for key in self.keys.values()
    ]
    return values[0] if all(value == values[0] for value in values) else None


def entries(*jobs: str) -> list[Entry]:
  """Returns all keys of these jobs (default: all jobs), section by section."""
  owners: dict[tuple[str, ...], dict[str, Key]] = {}
  below = set()
  for job in jobs or JOBS:
    for dotted, chosen, key in keys.walk(JOBS[job].settings):
      path = tuple(dotted.split("."))
      owners.setdefault(path, {}).setdefault(chosen or job, key)
      below |= {path} if chosen else set()
  sections = list(dict.fromkeys(path[0] for path in owners))
  return [
    Entry(
      path=path,
      keys=by,
      section=section_of(next(iter(by.values())).hint) is not None,
      chosen=path in below,
    )
    for path, by in sorted(owners.items(), key=lambda item: sections.index(item[0][0]))
  ]


def describe_keys(job: str, section: str | None = None) -> str:
  """Returns the keys of a job, each with its type, default and meaning.

  Args:
    job: name of the job.
    section: a section or a key; None: all keys.

  Raises:
    ValueError: the job has no such section or key.
  """
  listed, lines = _shown(entries(job)), []
  if section is not None:
    listed = _below_section(listed, section, job)
  for entry in listed:
    name = ".".join(entry.path)
    if entry.section and len(entry.path) == 1:
      lines.append("")
      if meaning := _meaning(entry, 1, entry.default):
        lines += textwrap.wrap(f"{name}: {meaning}", _WIDTH)
      continue
    lines.append(f"  --{name}={_type(entry)}  [{yaml_text.inline(entry.default)}]")
    lines += wrap(_meaning(entry, 1, entry.default), "      ")
  return "\n".join(lines)


def _below_section(listed: list[Entry], section: str, job: str) -> list[Entry]:
  path = tuple(section.split("."))
  chosen = [entry for entry in listed if entry.path[: len(path)] == path]
  if chosen:
    return chosen
  names = [".".join(entry.path) for entry in listed]
  top = ", ".join(e.path[0] for e in listed if e.section and len(e.path) == 1)
  remedy = did_you_mean(section, names, f"its sections are {top}")
  raise ValueError(f"--help {section}: the job {job!r} has no such section: {remedy}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
  """A key as a YAML file has it.

  Attributes:
    path: names from the section down.
    meaning: help of the key, one paragraph.
    value: default of the key.
    type: placeholder of the value, as `--help` shows it.
    may_change: a resumed run may have another value.
    is_section: True for a section, which has no value.
  """

  path: tuple[str, ...]
  meaning: str
  value: Any
  type: str
  may_change: bool
  is_section: bool


def base_config() -> str:
  """Returns all keys of all jobs with their defaults, as YAML with comments."""
  lines = [_HEAD.rstrip()]
  for line in listing():
    depth = len(line.path)
    indent = "  " * (depth - 1)
    lines += [""] * (depth == 1)
    lines += wrap(line.meaning, f"{indent}# ")
    value = "" if line.is_section else f" {yaml_text.inline(line.value)}"
    lines.append(f"{indent}{line.path[-1]}:{value}")
  return "\n".join(lines) + "\n"


def listing(*jobs: str) -> list[Line]:
  """Returns the keys of these jobs (default: all jobs), in the order of a file."""
  lines = []
  count = len(jobs or JOBS)
  shown = _shown(entries(*jobs))
  owners = {entry.path: len(entry.keys) for entry in shown}
  for entry in shown:
    depth = len(entry.path)
    all_have_it = owners.get(entry.path[:1], count) if depth > 1 else count
    # A file with all keys must not give one algorithm the default of another one.
    default = None if entry.chosen else entry.default
    meaning = f"{_meaning(entry, all_have_it, default)} {_choices(entry)}".strip()
    line = Line(
      path=entry.path,
      meaning=meaning,
      value=default,
      type="|".join(entry.keys) if entry.path == ("job",) else _type(entry),
      may_change=entry.key.facts.may_change,
      is_section=entry.section and depth == 1,
    )
    lines.append(line)
    if line.is_section and isinstance(section_of(entry.key.hint), Choice):
      more = {"meaning": f"One of {', '.join(_names(entry))}.", "type": "TEXT"}
      path = (*entry.path, "name")
      lines.append(dataclasses.replace(line, path=path, is_section=False, **more))
  return lines


def json_schema(job: str) -> dict[str, Any]:
  """Returns the JSON Schema of a job's files, for editors."""
  schema = _object(JOBS[job].settings)
  schema["properties"]["job"] = {"const": job, "description": "This job."}
  return {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": f"tunix train, job {job}",
    **schema,
  }


def _object(section: type) -> dict[str, Any]:
  properties: dict[str, Any] = {}
  for name, key in keys.of(section).items():
    kind = section_of(key.hint)
    value: dict[str, Any]
    if kind is None:
      value = json_type(key.hint)
    else:
      value = _choice(kind) if isinstance(kind, Choice) else _object(kind)
      if takes_null(key.hint) or not isinstance(kind, Choice):
        value = {"anyOf": [value, {"type": "null"}]}
    if key.meaning:
      value["description"] = sentence(key.meaning)
    if kind is None and key.default is not REQUIRED:
      value["default"] = plain(key.default)
    properties[name] = value
  return {"type": "object", "properties": properties, "additionalProperties": False}


def _choice(choice: Choice) -> dict[str, Any]:
  schemas = []
  for name, cls in choice.classes.items():
    schema = _object(cls)
    named = {"const": name, "description": (cls.__doc__ or "").split("\n")[0]}
    schema["properties"] = {"name": named} | schema["properties"]
    if name != choice.first:
      schema["required"] = ["name"]
    schemas.append(schema)
  return {"anyOf": schemas}


def _shown(listed: list[Entry]) -> list[Entry]:
  """Returns the entries without the keys of inner sections, which are mappings."""
  inner = {entry.path for entry in listed if entry.section and len(entry.path) > 1}
  return [e for e in listed if e.path in inner or e.path[:2] not in inner]


def _names(entry: Entry) -> list[str]:
  kinds = [section_of(key.hint) for key in entry.keys.values()]
  return [name for kind in kinds if isinstance(kind, Choice) for name in kind.classes]


def _meaning(entry: Entry, all_have_it: int, default: object) -> str:
  """Returns the help of a key: the jobs that have it, its meaning, and its defaults.

  Args:
    entry: the key.
    all_have_it: number of jobs that could have the key; if fewer have it, the text
      names them.
    default: the default that is shown; None: the text gives the defaults.
  """
  text = next((key.meaning for key in entry.keys.values() if key.meaning), "")
  kind = section_of(entry.key.hint)
  if not text and isinstance(kind, type):
    text = (kind.__doc__ or "").split("\n")[0]
  parts = [sentence(text)] if text else []
  if entry.path in _FROM_JOBS:
    parts.append(_FROM_JOBS[entry.path](*entry.keys))
  if entry.section and len(entry.path) > 1:
    parts.append(_below(entry))
  elif default is None and not entry.section:
    parts += _defaults(entry)
  text = " ".join(parts)
  if all_have_it > 1 and len(entry.keys) < all_have_it:
    return f"{', '.join(entry.keys)}: {text}"
  return text


def _jobs(*_: str) -> str:
  return sentence("; ".join(f"{name}: {job.summary}" for name, job in JOBS.items()))


def _record_forms(*_: str) -> str:
  """Returns the forms of records, with the jobs that train on them."""
  jobs: dict[str, list[str]] = {}
  for name, job in JOBS.items():
    for kind in job.records:
      jobs.setdefault(kind.expected.removeprefix("expected "), []).append(name)
  forms = [f"{form} ({', '.join(names)})" for form, names in jobs.items()]
  return f"Records: {'; '.join(forms)}."


# Keys with a part of their help that follows from a table of the jobs.
_FROM_JOBS: dict[tuple[str, ...], Callable[..., str]] = {
  ("job",): _jobs,
  ("data", "train"): _record_forms,
  ("training", "learning_rate"): rates.describe,
}


def _defaults(entry: Entry) -> list[str]:
  """Returns the default behind null, by job if it differs."""
  by: dict[str, list[str]] = {}
  for owner, key in entry.keys.items():
    if key.default is not REQUIRED:
      by.setdefault(yaml_text.inline(plain(key.default)), []).append(owner)
  if list(by) in ([], ["null"]):
    return []
  if len(by) == 1:
    return [f"By default {next(iter(by))}."]
  parts = [f"{value} ({', '.join(owners)})" for value, owners in by.items()]
  return [f"By default {', '.join(parts)}."]


def _below(entry: Entry) -> str:
  kind = section_of(entry.key.hint)
  assert isinstance(kind, type)
  parts = [
    f"{name}: {sentence(key.meaning)}" if key.meaning else f"{name}."
    for name, key in keys.of(kind).items()
  ]
  return "A mapping. " + " ".join(parts)


def _choices(entry: Entry) -> str:
  names = _type(entry)
  if entry.section or "|" not in names or names == BOOL or entry.path == ("job",):
    return ""
  return f"({names.replace('|', ', ')})"


def _type(entry: Entry) -> str:
  return "MAPPING" if entry.section else placeholder(entry.key.hint)


def wrap(text: str, indent: str) -> list[str]:
  """Wraps a text into lines that begin with `indent`."""
  return textwrap.wrap(
    text,
    _WIDTH,
    initial_indent=indent,
    subsequent_indent=indent,
    break_long_words=False,
    break_on_hyphens=False,
  )


if __name__ == "__main__":
  yaml_text.BASE_PATH.write_text(base_config())
