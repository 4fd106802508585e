"""From YAML files and the command line to a checked `Config`.

Later files override earlier ones key by key, the command line overrides files. A key
that nobody knows, or a value of the wrong type, is an error that says where it stands.
The only file that imports yaml.
"""

from __future__ import annotations

import dataclasses
import difflib
import pathlib
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from tunix.cli.convert import Argument, convert, describe, flatten, is_open, plain
from tunix.cli.schema import Config

BASE_NAME = "base_config.yaml"
BASE_PATH = pathlib.Path(__file__).with_name(BASE_NAME)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
  """A command line taken apart.

  Attributes:
    files: names of configuration files, in order.
    overrides: (key, value as it was typed), in order.
  """

  files: tuple[str, ...] = ()
  overrides: tuple[tuple[str, str], ...] = ()


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
        raise ValueError(f"{word} has no value: write {word}=VALUE")
      text = rest.pop(0)
    if key == "config":
      files += text.split(",")
    else:
      overrides.append((key, text))
  return Arguments(files=tuple(files), overrides=tuple(overrides))


def load(argv: Sequence[str]) -> Config:
  """The configuration that a command line describes.

  Raises:
    FileNotFoundError: no such file.
    ValueError: invalid YAML, an unknown key, a wrong type, a value out of range.
  """
  arguments = parse_arguments(argv)
  layers = [(name, read_file(name)) for name in arguments.files]
  for key, text in arguments.overrides:
    value: Any = _typed(text)
    for part in reversed(key.split(".")):
      value = {part: value}
    layers.append((f"--{key}", value))
  return from_layers(layers)


def from_layers(layers: Sequence[tuple[str, Mapping[str, Any]]]) -> Config:
  """A configuration from (where it stands, nested keys), later ones overriding.

  Raises:
    ValueError: see `load`.
  """
  values: dict[str, Any] = {}
  origins: dict[str, str] = {}
  for origin, layer in layers:
    try:
      _merge(values, layer, Config, "", origin, origins)
    except ValueError as error:
      raise ValueError(f"{origin}: {error}") from error
  try:
    return _build(Config, values)
  except ValueError as error:
    origin = origins.get(str(error).split(" ")[0])
    message = f"{origin}: {error}" if origin is not None else str(error)
    raise ValueError(message) from error


def read_file(name: str) -> dict[str, Any]:
  """The keys of a YAML file; "base_config.yaml" is ours where there is no other.

  Raises:
    FileNotFoundError: no such file.
    ValueError: invalid YAML, a key written twice, or no mapping.
  """
  path = pathlib.Path(name).expanduser()
  if name == BASE_NAME and not path.exists():
    path = BASE_PATH
  if not path.is_file():
    what = "a folder" if path.is_dir() else "no such file"
    raise FileNotFoundError(f"config {name!r}: {what}; give a YAML file")
  try:
    text = path.read_text(encoding="utf-8")
  except UnicodeDecodeError as error:
    raise ValueError(f"{name} is no UTF-8 text: give a YAML file") from error
  value = _parse(text, name)
  if value is None:
    return {}
  if not isinstance(value, dict):
    raise ValueError(f"{name} holds {describe(value)}, expected `key: value` lines")
  return value


def dump(config: Config) -> str:
  """YAML that `load` reads back to the same configuration."""
  return yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True)


def known_keys() -> list[str]:
  """Every dotted key."""
  return list(flatten(Config()))


def _merge(
  values: dict[str, Any],
  layer: Any,
  section: type,
  prefix: str,
  origin: str,
  origins: dict[str, str],
) -> None:
  """Writes a layer's keys over `values`, converted."""
  hints = typing.get_type_hints(section)
  for key, value in layer.items():
    dotted = f"{prefix}{key}"
    if key not in hints:
      raise ValueError(_unknown(dotted))
    origins[dotted] = origin
    hint = hints[key]
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
      inner = value.value if isinstance(value, Argument) else value
      if not isinstance(inner, dict | None):
        raise ValueError(f"{dotted} is {describe(inner)}, expected keys below it")
      _merge(
        values.setdefault(key, {}), inner or {}, hint, f"{dotted}.", origin, origins
      )
    elif is_open(hint):
      inner = _plain(value)
      # A bare `mesh:` empties the mapping; otherwise entries are added to it.
      old = {} if inner is None else values.get(key, {})
      values[key] = old | convert(inner or {}, hint, dotted)
    else:
      values[key] = convert(
        value if isinstance(value, Argument) else _plain(value), hint, dotted
      )


def _plain(value: Any) -> Any:
  if isinstance(value, Argument):
    return value.value
  if isinstance(value, dict):
    return {key: _plain(entry) for key, entry in value.items()}
  return value


def _build(section: type, values: Mapping[str, Any]) -> Any:
  hints = typing.get_type_hints(section)
  built = {
    key: _build(hints[key], value) if dataclasses.is_dataclass(hints[key]) else value
    for key, value in values.items()
  }
  return section(**built)


def _unknown(key: str) -> str:
  known = known_keys()
  last = key.rpartition(".")[2]
  same = [name for name in known if name.rpartition(".")[2] == last]
  near = same[:1] or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
  if not near:
    tails = {name.rpartition(".")[2]: name for name in known}
    near = [tails[t] for t in difflib.get_close_matches(last, tails, n=1, cutoff=0.5)]
  remedy = f"did you mean {near[0]}?" if near else f"see {BASE_NAME} for all keys"
  return f"the key {key!r} is unknown: {remedy}"


class _Loader(yaml.SafeLoader):
  """YAML 1.2's plain scalars: 1e-4 is a number, `no` and dates are text; a key written
  twice in one mapping is an error."""

  yaml_implicit_resolvers: typing.ClassVar[dict] = {}

  def construct_mapping(self, node: Any, deep: bool = False) -> dict:
    keys = [self.construct_object(key, deep=True) for key, _ in node.value]
    for key in keys:
      if keys.count(key) > 1:
        raise yaml.constructor.ConstructorError(
          None, None, f"the key {key!r} stands there twice", node.start_mark
        )
    return super().construct_mapping(node, deep=deep)


_SCALARS = {
  "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
  "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
  "int": (r"[-+]?[0-9][0-9_]*", list("-+0123456789")),
  "float": (
    r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    list("-+.0123456789"),
  ),
}
for _tag, (_pattern, _first) in _SCALARS.items():
  _Loader.add_implicit_resolver(
    f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first
  )
_Loader.add_constructor(
  # YAML 1.1 would read 010 as eight.
  "tag:yaml.org,2002:int",
  lambda loader, node: int(str(node.value)),
)


def _typed(text: str) -> Argument:
  """A value of the command line; what is no YAML ("a: b: c") is text."""
  try:
    return Argument(_parse(text, ""), text)
  except ValueError:
    return Argument(text, text)


def _parse(text: str, origin: str) -> Any:
  try:
    # A SafeLoader: it builds plain values only.
    return yaml.load(text, Loader=_Loader)
  except RecursionError as error:
    raise ValueError(
      f"{origin or 'an argument'}: nested too deeply: flatten it"
    ) from error
  except yaml.YAMLError as error:
    place = getattr(error, "problem_mark", None)
    where = origin if place is None else f"{origin}:{place.line + 1}"
    problem = getattr(error, "problem", None) or "it cannot be read"
    raise ValueError(f"{where}: invalid YAML ({problem}): correct that line") from error
