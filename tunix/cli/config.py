"""From YAML files and the command line to the settings of a job.

Later files override earlier ones key by key, the command line overrides files. A key
that nobody knows, or a value of the wrong type, is an error that says where it stands.
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
)
from tunix.cli.settings.run import RunSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
  """A command line taken apart.

  Attributes:
    files: names of configuration files, in order.
    overrides: (key, value as it was typed), in order.
  """

  files: tuple[str, ...] = ()
  overrides: tuple[tuple[str, str], ...] = ()


# Names before a value that are no keys.
_OWN = ("config", "rows", "model", "tokenizer", "columns")


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
        if key not in (*known_keys(), *spelling.ALIASES, *spelling.RENAMED, *_OWN):
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
  """The settings that a command line describes, of the class that its `job` has.

  Args:
    argv: files and overrides.
    origins: is filled, see `from_layers`.
    last: a layer (where it stands, nested keys) over all of them.

  Raises:
    FileNotFoundError: no such file.
    ValueError: invalid YAML, an unknown key, a wrong type, a value out of range.
  """
  layers = _layers(argv) + ([] if last is None else [last])
  return from_layers(layers, note=_say, origins=origins)


def job_of(argv: Sequence[str]) -> str:
  """The job that a command line is about; its other keys are not looked at.

  Raises:
    FileNotFoundError, ValueError: see `load`.
  """
  values: dict[str, Any] = {}
  for origin, layer in _layers(argv):
    _merge(values, layer, "", origin, {})
  return _job_of(values)


def _layers(argv: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
  arguments = parse_arguments(argv)
  layers = [(name, yaml_text.read_file(name)) for name in arguments.files]
  for key, text in arguments.overrides:
    value: Any = _typed(text)
    for part in reversed(key.split(".")):
      value = {part: value}
    layers.append((f"--{key}", value))
  return layers


def from_layers(
  layers: Sequence[tuple[str, Mapping[str, Any]]],
  note: Callable[[str], None] = lambda text: None,
  origins: dict[str, str] | None = None,
) -> RunSettings:
  """Settings from (where it stands, nested keys), later ones overriding.

  Args:
    layers: files and arguments, in order.
    note: is told of keys in an old spelling.
    origins: is filled with the layer that set each dotted key last; None: nobody asks.

  Raises:
    ValueError: see `load`.
  """
  values: dict[str, Any] = {}
  origins = {} if origins is None else origins
  for origin, layer in layers:
    _merge(values, layer, "", origin, origins)
  try:
    spelling.settle(values, origins, note)
    job = _job_of(values)
    return _build(JOBS[job].settings, values, "", _Place(job))
  except ValueError as error:
    origin = _origin(str(error), origins)
    raise ValueError(f"{origin}: {error}" if origin else str(error)) from error


def dump(config: RunSettings) -> str:
  """YAML that `load` reads back to the same settings."""
  return yaml_text.lines(keys.as_plain(config))


@functools.cache
def known_keys() -> dict[str, list[tuple[str, str | None, keys.Key]]]:
  """{dotted key: (job, choice or None, key) of all that have it}, sections included."""
  owners: dict[str, list[tuple[str, str | None, keys.Key]]] = {}
  for name, job in JOBS.items():
    for dotted, chosen, key in keys.walk(job.settings):
      owners.setdefault(dotted, []).append((name, chosen, key))
      if isinstance(section := section_of(key.hint), Choice):
        choice = keys.Key(hint=_names(section), default=None, meaning="")
        owners.setdefault(f"{dotted}.name", []).append((name, None, choice))
  return owners


def _names(choice: Choice) -> Any:
  """The type of the key `name` that chooses."""
  return Literal[tuple(choice.classes)]  # pyright: ignore


@dataclasses.dataclass(frozen=True)
class _Place:
  """Where keys are read: by a job, and by what a key `name` chose in it."""

  job: str
  chosen: str | None = None


def _say(text: str) -> None:
  print(f"tunix: note: {text}", file=sys.stderr)


def _origin(message: str, origins: Mapping[str, str]) -> str | None:
  """Where the key was set that a message begins with, or names as "the key 'x'"."""
  named = re.match(r"(?:the key ')?([\w.]+)", message)
  return None if named is None else origins.get(named[1])


def _merge(
  values: dict[str, Any],
  layer: Mapping[str, Any],
  prefix: str,
  origin: str,
  origins: dict[str, str],
) -> None:
  """Writes a layer's keys over `values`; types are looked at when all are merged,
  because the job and the algorithm, which say what keys there are, may come last."""
  for key, value in layer.items():
    dotted = f"{prefix}{key}"
    origins[dotted] = origin
    inner = (
      value.value if isinstance(value, Argument) and _holds_keys(dotted) else value
    )
    if isinstance(inner, dict):
      old = values.get(key)
      values[key] = dict(old) if isinstance(old, dict) else {}
      _merge(values[key], inner, f"{dotted}.", origin, origins)
    elif _plain(value) is not None or not _is_section(dotted):
      values[key] = value
    # else a section without keys ("lora:"), which says nothing


def _holds_keys(dotted: str) -> bool:
  """Whether "{a: 1}" and "a: 1", typed for this key, are a mapping and not a text."""
  known = known_keys().get(dotted, ())
  return not known or any(
    section_of(key.hint) is not None or is_open(key.hint) for _, _, key in known
  )


def _is_section(dotted: str) -> bool:
  return any(
    section_of(key.hint) is not None for _, _, key in known_keys().get(dotted, ())
  )


def _job_of(values: Mapping[str, Any]) -> str:
  job = _plain(values.get("job"))
  if job is None:
    return next(iter(JOBS))
  if not isinstance(job, str) or job not in JOBS:
    raise ValueError(f"job is {describe(job)}, expected one of {', '.join(JOBS)}")
  return job


def _plain(value: Any) -> Any:
  if isinstance(value, Argument):
    return value.value
  if isinstance(value, dict):
    return {key: _plain(entry) for key, entry in value.items()}
  return value


def _build(section: type, values: Mapping[str, Any], prefix: str, place: _Place) -> Any:
  """The dataclass `section` with these values; null where a field does not take it
  means that it is not set."""
  known, arguments = keys.of(section), {}
  for name, value in values.items():
    dotted = f"{prefix}{name}"
    if name not in known and isinstance(value, dict) and dotted not in known_keys():
      # A misspelt section: what was meant is seen by the key below it.
      dotted = next((f"{dotted}.{below}" for below in value), dotted)
    if name not in known:
      _check_foreign(dotted, _plain(value), place)
      continue
    hint = known[name].hint
    if section_of(hint) is not None:
      arguments[name] = _build_section(hint, value, dotted, place)
    elif _plain(value) is not None or takes_null(hint):
      typed = value if isinstance(value, Argument) else _plain(value)
      arguments[name] = convert(typed, hint, dotted)
  with keys.under(prefix[:-1], section):
    return section(**arguments)


def _build_section(hint: Any, value: Any, dotted: str, place: _Place) -> Any:
  kind, values = section_of(hint), value
  if not isinstance(values, dict):
    if _plain(value) is None:
      if takes_null(hint):
        return None
      values = {}
    else:
      inner = describe(_plain(value))
      raise ValueError(f"{dotted} is {inner}, expected keys below it")
  if isinstance(kind, Choice):
    # Null means the default of the one that is chosen, also where that takes null.
    values = {name: v for name, v in values.items() if _plain(v) is not None}
    named = convert(values.pop("name", kind.first), _names(kind), f"{dotted}.name")
    place, kind = _Place(place.job, named), kind.classes[named]
  assert isinstance(kind, type)
  if takes_null(hint) and not _is_asked_for(kind, values, dotted):
    return None
  return _build(kind, values, f"{dotted}.", place)


def _is_asked_for(section: type, values: Mapping[str, Any], dotted: str) -> bool:
  """Whether a section that may be left out is there: some of its keys are set, and all
  of those that it cannot do without; or it is `{}`, which asks for the defaults."""
  known = keys.of(section)
  required = [name for name, key in known.items() if key.default is keys.REQUIRED]
  missing = [name for name in required if _plain(values.get(name)) is None]
  if not missing:
    return bool(required or not values) or any(
      _plain(v) is not None for v in values.values()
    )
  for name, value in values.items():
    if name not in known:
      raise ValueError(_unknown(f"{dotted}.{name}"))
    if not _says_nothing(_plain(value), known[name]):
      raise ValueError(
        f"{dotted}.{name} is set and {dotted}.{missing[0]} is not, so nothing would "
        f"read it: set {dotted}.{missing[0]}, or leave it out"
      )
  return False


def _says_nothing(value: Any, key: keys.Key) -> bool:
  return value in (None, {}, []) or value == plain(key.default)


def _check_foreign(dotted: str, value: Any, place: _Place) -> None:
  """Refuses a key that is not read here; one of another job may say its default."""
  owners = known_keys().get(dotted)
  if owners is None:
    raise ValueError(_unknown(dotted))
  if isinstance(value, dict) and _is_section(dotted):
    for name, entry in value.items():
      _check_foreign(f"{dotted}.{name}", entry, place)
    return
  # What an algorithm does by default (DAPO samples dynamically) is no default of the
  # others: only null says nothing of it.
  if value in (None, {}, []) or any(
    chosen is None and value == plain(key.default) for _, chosen, key in owners
  ):
    return
  chosen = [c for job, c, _ in owners if c is not None and job == place.job]
  if chosen:
    who, names = f"the algorithm {place.chosen!r}", chosen
  else:
    who, names = f"the job {place.job!r}", [job for job, _, _ in owners]
  names = list(dict.fromkeys(names))
  what = who.split()[1]
  remedy = JOBS[place.job].settings.instead.get(
    dotted, f"it belongs to the {what}{'s' * (len(names) > 1)} {' and '.join(names)}"
  )
  raise ValueError(f"{dotted} is {value!r}, and {who} does not read it: {remedy}")


def _unknown(key: str) -> str:
  known = [name for name in known_keys() if not _is_section(name)]
  last = key.rpartition(".")[2]
  section, _, _ = key.rpartition(".")
  sections = list(dict.fromkeys(n.partition(".")[0] for n in known if "." in n))
  near_section = difflib.get_close_matches(section, sections, n=1)
  if near_section:  # first where it was looked for: --traning.max_stps
    below = [n for n in known if n.startswith(f"{near_section[0]}.")]
    near = difflib.get_close_matches(
      f"{near_section[0]}.{last}", below, n=1, cutoff=0.8
    )
    if near:
      return f"the key {key!r} is unknown: did you mean {near[0]}?"
  if (ours := spelling.ELSEWHERE.get(last)) is not None:
    told = (
      f"did you mean {ours}?" if "." in key and ours in known else f"here it is {ours}"
    )
    return f"the key {key!r} is unknown: {told}"
  same = [name for name in known if name.rpartition(".")[2] == last]
  near = same[:1] or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
  if not near:
    tails = {name.rpartition(".")[2]: name for name in known}
    near = [tails[t] for t in difflib.get_close_matches(last, tails, n=1, cutoff=0.5)]
  remedy = f"did you mean {near[0]}?" if near else "see `tunix train --help`"
  return f"the key {key!r} is unknown: {remedy}"


def _typed(text: str) -> Argument:
  """A value of the command line; what is no YAML ("a: b: c") is text."""
  try:
    return Argument(yaml_text.parse(text, "an argument"), text)
  except ValueError:
    return Argument(text, text)
