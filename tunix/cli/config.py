"""Reads the settings of a job from YAML files and the command line.

Later files override earlier ones key by key, and the command line overrides files. An
unknown key or a value of the wrong type is an error that names the file or argument.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from tunix.cli.jobs.table import JOBS
from tunix.cli.settings import keys, spelling, yaml_text
from tunix.cli.settings.convert import (
  Argument,
  Choice,
  convert,
  describe,
  is_open,
  plain,
  section_of,
  takes_null,
  without_text,
)
from tunix.cli.settings.run import RunSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
  """The parts of a command line.

  Attributes:
    files: names of configuration files, in order.
    overrides: (key, typed text of the value), in order.
  """

  files: tuple[str, ...] = ()
  overrides: tuple[tuple[str, str], ...] = ()


# Options of subcommands that take a value and are no keys.
_OPTIONS = ("config", "rows", "model", "tokenizer", "columns")


def parse_arguments(argv: Sequence[str]) -> Arguments:
  """Reads `FILE[,FILE]`, `--config FILE[,FILE]`, `--key.sub=value`, `--key.sub value`.

  Raises:
    ValueError: a key without a value.
  """
  files: list[str] = []
  overrides: list[tuple[str, str]] = []
  rest = list(argv)
  while rest:
    word = rest.pop(0)
    if not word.startswith("--"):
      files += word.split(",")
      continue
    key, equals, text = word[2:].partition("=")
    if not equals:
      if not rest or rest[0].startswith("--"):
        if key not in (*known_keys(), *spelling.ALIASES, *spelling.RENAMED, *_OPTIONS):
          raise ValueError(f"{word}: {_unknown(key)}")
        raise ValueError(f"{word} has no value: write {word}=VALUE")
      text = rest.pop(0)
    if key == "config":
      files += text.split(",")
    else:
      overrides.append((key, text))
  return Arguments(files=tuple(files), overrides=tuple(overrides))


def load(
  argv: Sequence[str],
  origins: dict[str, str] | None = None,
  *,
  last: tuple[str, Mapping[str, Any]] | None = None,
) -> RunSettings:
  """Returns the settings of a command line, of the class of its job.

  Args:
    argv: files and overrides.
    origins: filled as by `from_layers`.
    last: a layer (origin, nested keys) that overrides all others.

  Raises:
    FileNotFoundError: no such file.
    ValueError: invalid YAML, an unknown key, a wrong type, a value out of range.
  """
  layers = _layers(argv) + ([] if last is None else [last])
  return from_layers(layers, note=_say, origins=origins)


def job_of(argv: Sequence[str]) -> str:
  """Returns the job of a command line without checking any other key.

  Raises:
    FileNotFoundError, ValueError: as for `load`.
  """
  values: dict[str, Any] = {}
  for origin, layer in _layers(argv):
    _merge(values, layer, "", origin, {})
  return _job_of(values)


def _layers(argv: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
  arguments = parse_arguments(argv)
  layers = [(name, yaml_text.read_file(name)) for name in arguments.files]
  for key, text in arguments.overrides:
    value: Any = yaml_text.argument(text)
    for part in reversed(key.split(".")):
      value = {part: value}
    layers.append((f"--{key}", value))
  return layers


def from_layers(
  layers: Sequence[tuple[str, Mapping[str, Any]]],
  note: Callable[[str], None] = lambda text: None,
  origins: dict[str, str] | None = None,
) -> RunSettings:
  """Returns the settings of several layers, of which later ones override earlier ones.

  Args:
    layers: (origin, nested keys) of files and arguments, in order. The origin is the
      name of the file, or the argument.
    note: function that is called with a sentence about every key in an old spelling.
    origins: filled with {dotted key: origin of the last layer that set it}.

  Raises:
    ValueError: as for `load`.
  """
  values: dict[str, Any] = {}
  origins = {} if origins is None else origins
  for origin, layer in layers:
    _merge(values, layer, "", origin, origins)
  try:
    spelling.rename_old_keys(values, origins, note)
    job = _job_of(values)
    return _build(JOBS[job].settings, values, "", _Place(job))
  except ValueError as error:
    origin = _origin(str(error), origins)
    raise ValueError(f"{origin}: {error}" if origin else str(error)) from error


def dump(config: RunSettings) -> str:
  """Returns YAML that `load` reads back to the same settings."""
  return yaml_text.lines(keys.as_plain(config))


@functools.cache
def known_keys() -> dict[str, list[tuple[str, str | None, keys.Key]]]:
  """Returns {dotted key: (job, choice or None, key) of each job that has it}.

  Sections are included.
  """
  owners: dict[str, list[tuple[str, str | None, keys.Key]]] = {}
  for name, job in JOBS.items():
    for dotted, chosen, key in keys.walk(job.settings):
      owners.setdefault(dotted, []).append((name, chosen, key))
      if isinstance(section := section_of(key.hint), Choice):
        choice = keys.Key(hint=_names(section), default=None, meaning="")
        owners.setdefault(f"{dotted}.name", []).append((name, None, choice))
  return owners


def _names(choice: Choice) -> Any:
  """Returns the type of the key `name` of a choice."""
  return Literal[tuple(choice.classes)]  # pyright: ignore


@dataclasses.dataclass(frozen=True)
class _Place:
  """The job, and the name chosen in it, that read the keys of a section."""

  job: str
  chosen: str | None = None


def _say(text: str) -> None:
  print(f"tunix: note: {text}", file=sys.stderr)


def _origin(message: str, origins: Mapping[str, str]) -> str | None:
  """Returns the origin of the key that a message begins with, as in "the key 'x'"."""
  named = re.match(r"(?:the key ')?([\w.]+)", message)
  return None if named is None else origins.get(named[1])


def _merge(
  values: dict[str, Any],
  layer: Mapping[str, Any],
  prefix: str,
  origin: str,
  origins: dict[str, str],
) -> None:
  """Writes the keys of a layer over `values`, in place.

  Types are checked when all layers are merged: the job and the algorithm, which decide
  what keys exist, may come last.
  """
  for key, value in layer.items():
    dotted = f"{prefix}{key}"
    origins[dotted] = origin
    # "{a: 1}" typed for a section is a mapping; typed for a text key it is a text.
    is_mapping = isinstance(value, Argument) and _holds_keys(dotted)
    inner = value.value if is_mapping else value
    if isinstance(inner, dict):
      old = values.get(key)
      values[key] = dict(old) if isinstance(old, dict) else {}
      _merge(values[key], inner, f"{dotted}.", origin, origins)
    elif without_text(value) is not None or not _is_section(dotted):
      values[key] = value
    # else a section without keys ("lora:"), which sets nothing


def _holds_keys(dotted: str) -> bool:
  """Returns True for sections, for mappings with free keys, and for unknown keys."""
  entries = known_keys().get(dotted, ())
  return not entries or any(
    section_of(key.hint) is not None or is_open(key.hint) for _, _, key in entries
  )


def _is_section(dotted: str) -> bool:
  return any(
    section_of(key.hint) is not None for _, _, key in known_keys().get(dotted, ())
  )


def _job_of(values: Mapping[str, Any]) -> str:
  job = without_text(values.get("job"))
  if job is None:
    return next(iter(JOBS))
  if not isinstance(job, str) or job not in JOBS:
    raise ValueError(f"job is {describe(job)}, expected one of {', '.join(JOBS)}")
  return job


def _build(section: type, values: Mapping[str, Any], prefix: str, place: _Place) -> Any:
  """Returns the dataclass `section` with these values.

  A null leaves the key at its default if the field does not take null.
  """
  entries, arguments = keys.of(section), {}
  for name, value in values.items():
    dotted = f"{prefix}{name}"
    if name not in entries and isinstance(value, dict) and dotted not in known_keys():
      # A misspelt section: the key below it shows which section was meant.
      dotted = next((f"{dotted}.{below}" for below in value), dotted)
    if name not in entries:
      _check_foreign(dotted, without_text(value), place)
      continue
    hint = entries[name].hint
    if section_of(hint) is not None:
      arguments[name] = _build_section(hint, value, dotted, place)
    elif without_text(value) is not None or takes_null(hint):
      typed = value if isinstance(value, Argument) else without_text(value)
      arguments[name] = convert(typed, hint, dotted)
  for name, key in entries.items():
    if key.facts.in_command is not None:
      arguments.setdefault(name, key.default)
  with keys.under(prefix[:-1], section):
    return section(**arguments)


def _build_section(hint: object, value: object, dotted: str, place: _Place) -> Any:
  kind, values = section_of(hint), value
  if not isinstance(values, dict):
    if without_text(value) is None:
      if takes_null(hint):
        return None
      values = {}
    else:
      inner = describe(without_text(value))
      raise ValueError(f"{dotted} is {inner}, expected keys below it")
  if isinstance(kind, Choice):
    # Null means the default of the chosen class, also for fields that take null.
    values = {name: v for name, v in values.items() if without_text(v) is not None}
    named = convert(values.pop("name", kind.first), _names(kind), f"{dotted}.name")
    place, kind = _Place(place.job, named), kind.classes[named]
  assert isinstance(kind, type)
  if takes_null(hint) and not _is_present(kind, values, dotted):
    return None
  return _build(kind, values, f"{dotted}.", place)


def _is_present(section: type, values: Mapping[str, Any], dotted: str) -> bool:
  """Returns True if an optional section is configured.

  Some of its keys are set, and all required ones; or it is `{}`, which means its
  defaults.

  Raises:
    ValueError: a key is set and a required one is not.
  """
  entries = keys.of(section)
  required = [name for name, key in entries.items() if key.default is keys.REQUIRED]
  missing = [name for name in required if without_text(values.get(name)) is None]
  if not missing:
    return bool(required or not values) or any(
      without_text(v) is not None for v in values.values()
    )
  for name, value in values.items():
    if name not in entries:
      raise ValueError(_unknown(f"{dotted}.{name}"))
    if not _is_default(without_text(value), entries[name]):
      raise ValueError(
        f"{dotted}.{name} is set and {dotted}.{missing[0]} is not, so nothing reads "
        f"{dotted}.{name}: set {dotted}.{missing[0]}, or leave it out"
      )
  return False


def _is_default(value: object, key: keys.Key) -> bool:
  return value in (None, {}, []) or value == plain(key.default)


def _check_foreign(dotted: str, value: object, place: _Place) -> None:
  """Refuses a key that this job does not read.

  A key of another job passes with its default, so that files with all keys load.
  """
  owners = known_keys().get(dotted)
  if owners is None:
    raise ValueError(_unknown(dotted))
  if isinstance(value, dict) and _is_section(dotted):
    for name, entry in value.items():
      _check_foreign(f"{dotted}.{name}", entry, place)
    return
  # The default of one algorithm (dynamic sampling of DAPO) would be a change in
  # another one, so for the keys of an algorithm only null passes.
  if value in (None, {}, [], spelling.FORMER_DEFAULTS.get(dotted)) or any(
    chosen is None and value == plain(key.default) for _, chosen, key in owners
  ):
    return
  chosen = [c for job, c, _ in owners if c is not None and job == place.job]
  if chosen:
    what, reader, names = "algorithm", place.chosen, chosen
  else:
    what, reader, names = "job", place.job, [job for job, _, _ in owners]
  names = list(dict.fromkeys(names))
  remedy = JOBS[place.job].settings.instead.get(
    dotted, f"it belongs to the {what}{'s' * (len(names) > 1)} {' and '.join(names)}"
  )
  raise ValueError(
    f"{dotted} is {value!r}, and the {what} {reader!r} does not read it: {remedy}"
  )


def _unknown(key: str) -> str:
  return f"the key {key!r} is unknown: {_advice(key)}"


def _advice(key: str) -> str:
  """Returns the advice about an unknown key, usually the nearest known one."""
  names = [name for name in known_keys() if not _is_section(name)]
  section, _, last = key.rpartition(".")
  sections = list(dict.fromkeys(n.partition(".")[0] for n in names if "." in n))
  for near in difflib.get_close_matches(section, sections, n=1):
    # In the section that is meant: --traning.max_stps.
    below = [name for name in names if name.startswith(f"{near}.")]
    for likely in difflib.get_close_matches(f"{near}.{last}", below, n=1, cutoff=0.8):
      return f"did you mean {likely}?"
  if (ours := spelling.ELSEWHERE.get(last)) is not None:
    is_ours = "." in key and ours in names
    return f"did you mean {ours}?" if is_ours else f"here it is {ours}"
  tails = {name.rpartition(".")[2]: name for name in reversed(names)}
  # A section that is the name of a key: --teacher.path.
  ours = tails.get(section.rpartition(".")[2]) or spelling.ELSEWHERE.get(section)
  if ours is not None and section not in sections:
    return f"did you mean {ours}?"
  if last in tails:  # the right name in another section
    return f"did you mean {tails[last]}?"
  near = difflib.get_close_matches(key, names, n=1, cutoff=0.8)
  near += filter(None, [spelling.by_words(key, names)])
  near += difflib.get_close_matches(key, names, n=1, cutoff=0.5)
  near += [tails[t] for t in difflib.get_close_matches(last, tails, n=1, cutoff=0.5)]
  return f"did you mean {near[0]}?" if near else "see `tunix train --help`"
