"""What `tunix train` can be told, in three forms: help, YAML, JSON Schema.

All of it is read off the dataclasses of the jobs (names, types, defaults, docstrings).
`python -m tunix.cli.settings.reference` writes `base_config()` to `base_config.yaml`.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import textwrap
from typing import Any

from tunix.cli.jobs.table import JOBS
from tunix.cli.settings import keys, yaml_text
from tunix.cli.settings.convert import Choice, json_type, plain, section_of, takes_null
from tunix.cli.settings.keys import REQUIRED, Key

_WIDTH = 88
_BOOL = "true|false"

_HEAD = """\
# Every key of a run, with its default. A file of yours needs only what differs:
#
#   tunix train --config mine.yaml --training.max_steps=500
#
# Files given later and arguments override key by key. `null` means "not set". Before a
# colon stand the jobs (or algorithms) that have a key, where not all do; `tunix train
# --help --job=JOB` shows those of one.
# Made by `python -m tunix.cli.settings.reference`.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
  """A key of some jobs.

  Attributes:
    path: names from the section down.
    keys: by the jobs that have it, or, below an algorithm, by algorithms.
    section: whether keys stand below it.
    chosen: whether it stands below a choice, where null means what the one that is
      chosen has by default.
  """

  path: tuple[str, ...]
  keys: dict[str, Key]
  section: bool
  chosen: bool

  @property
  def key(self) -> Key:
    """Of the first that has it."""
    return next(iter(self.keys.values()))

  @property
  def default(self) -> Any:
    """As YAML has it; null where it is required, or differs."""
    if self.path == ("job",):
      return next(iter(self.keys))
    values = [
      None if key.default is REQUIRED or self.section else plain(key.default)
      for key in self.keys.values()
    ]
    return values[0] if all(value == values[0] for value in values) else None


def entries(*jobs: str) -> list[Entry]:
  """All keys of these jobs (of all, without any), section by section."""
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
  """The keys of a job, each with its type, default and meaning.

  Args:
    job: its name.
    section: a section, or a key; None: all of them.

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
  known = [".".join(entry.path) for entry in listed]
  near = difflib.get_close_matches(section, known, n=1)
  top = ", ".join(e.path[0] for e in listed if e.section and len(e.path) == 1)
  remedy = f"did you mean {near[0]}?" if near else f"its sections are {top}"
  raise ValueError(f"--help {section}: the job {job!r} has no such section: {remedy}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
  """A key as a file of YAML has it.

  Attributes:
    path: names from the section down.
    meaning: what it is, one paragraph.
    value: its default.
    is_section: whether keys stand below it; it has no value then.
  """

  path: tuple[str, ...]
  meaning: str
  value: Any
  is_section: bool


def base_config() -> str:
  """All keys of all jobs with their defaults, as YAML with comments."""
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
  """The keys of these jobs (of all, without any), in the order of a file."""
  lines = []
  count = len(jobs or JOBS)
  shown = _shown(entries(*jobs))
  owners = {entry.path: len(entry.keys) for entry in shown}
  for entry in shown:
    depth = len(entry.path)
    all_have_it = owners.get(entry.path[:1], count) if depth > 1 else count
    # A file with all keys must not say of one algorithm what another has by default.
    default = None if entry.chosen else entry.default
    meaning = f"{_meaning(entry, all_have_it, default)} {_choices(entry)}".strip()
    is_section = entry.section and depth == 1
    lines.append(
      Line(path=entry.path, meaning=meaning, value=default, is_section=is_section)
    )
    if is_section and isinstance(section_of(entry.key.hint), Choice):
      names = f"One of {', '.join(_names(entry))}."
      path = (*entry.path, "name")
      lines.append(Line(path=path, meaning=names, value=None, is_section=False))
  return lines


def json_schema(job: str) -> dict[str, Any]:
  """The JSON Schema of a job's files, for editors."""
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
      value["description"] = _sentence(key.meaning)
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
  """Without what stands below a section in a section: that is one entry, a mapping."""
  inner = {entry.path for entry in listed if entry.section and len(entry.path) > 1}
  return [e for e in listed if e.path in inner or e.path[:2] not in inner]


def _names(entry: Entry) -> list[str]:
  kinds = [section_of(key.hint) for key in entry.keys.values()]
  return [name for kind in kinds if isinstance(kind, Choice) for name in kind.classes]


def _meaning(entry: Entry, all_have_it: int, default: Any) -> str:
  """In one paragraph: who has it, what it means, what it can be, and which default
  stands behind null."""
  text = next((key.meaning for key in entry.keys.values() if key.meaning), "")
  kind = section_of(entry.key.hint)
  if not text and isinstance(kind, type):
    text = (kind.__doc__ or "").split("\n")[0]
  parts = [_sentence(text)] if text else []
  if entry.section and len(entry.path) > 1:
    parts.append(_below(entry))
  elif default is None and not entry.section:
    parts += _defaults(entry)
  text = " ".join(parts)
  if all_have_it > 1 and len(entry.keys) < all_have_it:
    return f"{', '.join(entry.keys)}: {text}"
  return text


def _defaults(entry: Entry) -> list[str]:
  """What null means."""
  by: dict[str, list[str]] = {}
  for owner, key in entry.keys.items():
    if key.default is not REQUIRED:
      by.setdefault(yaml_text.inline(plain(key.default)), []).append(owner)
  if list(by) in ([], ["null"]):
    return []
  if len(by) == 1:
    return [f"By default {next(iter(by))}."]
  told = [f"{value} ({', '.join(owners)})" for value, owners in by.items()]
  return [f"By default {', '.join(told)}."]


def _below(entry: Entry) -> str:
  kind = section_of(entry.key.hint)
  assert isinstance(kind, type)
  told = [
    f"{name}: {_sentence(key.meaning)}" if key.meaning else f"{name}."
    for name, key in keys.of(kind).items()
  ]
  return "A mapping. " + " ".join(told)


def _choices(entry: Entry) -> str:
  names = _type(entry)
  if entry.section or "|" not in names or names == _BOOL or entry.path == ("job",):
    return ""
  return f"({names.replace('|', ', ')})"


def _type(entry: Entry) -> str:
  """As a placeholder: N, TEXT, a|b."""
  if entry.section:
    return "MAPPING"
  schema = json_type(entry.key.hint)
  one = schema.get("anyOf", [schema])[0]
  if "enum" in one:
    return "|".join(one["enum"])
  names = {"integer": "N", "number": "NUMBER", "boolean": _BOOL}
  more = {"array": "[LIST]", "object": "{MAPPING}", "string": "TEXT"}
  return (names | more)[one["type"]]


def _sentence(text: str) -> str:
  """Python's words as YAML's, from a capital (but not of a value) to a full stop."""
  for ours, theirs in (("None", "null"), ("True", "true"), ("False", "false")):
    text = re.sub(rf"\b{ours}\b", theirs, text)
  text = text.replace("`", "")
  if not re.match(r"[a-z]\w*[:_(]", text):
    text = f"{text[:1].upper()}{text[1:]}"
  return text if text.endswith(".") else f"{text}."


def wrap(text: str, indent: str) -> list[str]:
  """The text in lines that begin with `indent`."""
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
