"""Reads and writes YAML; the only file that imports yaml."""

from __future__ import annotations

import pathlib
import re
import typing
from typing import Any

import yaml

from tunix.cli.settings.convert import Argument, describe
from tunix.utils import text_files

BASE_NAME = "base_config.yaml"
BASE_PATH = pathlib.Path(__file__).parents[1] / BASE_NAME


def read_file(name: str) -> dict[str, Any]:
  """Reads the keys of a YAML file.

  The name "base_config.yaml" means the packaged file if there is no file of this name.

  Raises:
    FileNotFoundError: no such file.
    ValueError: invalid YAML, a key written twice, or no mapping.
  """
  path = _place(name)
  if not path.is_file():
    what = "a pipe or a device" if path.exists() else "no such file"
    what = "a folder" if path.is_dir() else what
    raise FileNotFoundError(f"config {name!r}: {what}; give a YAML file")
  value = parse(text_files.read(path), name)
  if value is None:
    return {}
  if not isinstance(value, dict):
    raise ValueError(f"{name} holds {describe(value)}, expected `key: value` lines")
  return value


def key_lines(name: str) -> dict[str, int]:
  """Returns {dotted key: line, from 1} of a file that `read_file` reads."""
  numbers: dict[str, int] = {}
  node = yaml.compose(text_files.read(_place(name)), Loader=_Loader)
  _note_lines(node, "", numbers)
  return numbers


def _note_lines(node: object, prefix: str, numbers: dict[str, int]) -> None:
  if isinstance(node, yaml.MappingNode):
    for key, value in node.value:
      numbers[f"{prefix}{key.value}"] = key.start_mark.line + 1
      _note_lines(value, f"{prefix}{key.value}.", numbers)


def _place(name: str) -> pathlib.Path:
  path = pathlib.Path(name).expanduser()
  return BASE_PATH if name == BASE_NAME and not path.exists() else path


def parse(text: str, origin: str) -> Any:
  """Parses a text of YAML to plain values.

  Args:
    text: text of a file, or of one value.
    origin: file or argument of the text, for error messages.

  Raises:
    ValueError: invalid YAML, or a key written twice; begins with `origin`.
  """
  try:
    # Our loader extends SafeLoader, which builds plain values only.
    value = yaml.load(text, Loader=_Loader)
  except RecursionError as error:
    raise ValueError(f"{origin}: nested too deeply: flatten it") from error
  except yaml.YAMLError as error:
    place = getattr(error, "problem_mark", None)
    where = origin if place is None else f"{origin}:{place.line + 1}"
    problem = getattr(error, "problem", None) or "it cannot be read"
    raise ValueError(f"{where}: invalid YAML ({problem}): correct that line") from error
  _check_aliases(value, origin)
  return value


def argument(text: str) -> Argument:
  """Returns a value of the command line; invalid YAML ("a: b: c") is a text."""
  try:
    return Argument(parse(text, "an argument"), text)
  except ValueError:
    return Argument(text, text)


_MOST_VALUES = 1_000_000


def _check_aliases(value: object, origin: str) -> None:
  """Refuses a value that contains itself, or that aliases repeat too many times.

  Raises:
    ValueError: begins with `origin` and names the key.
  """
  left, count = [(value, "", ())], 0
  while left:
    value, key, above = left.pop()
    if not isinstance(value, dict | list):
      continue
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    count += 1 + len(value)
    if id(value) in above:
      raise ValueError(
        f"{origin}: the key {key!r} contains itself: write its value out in place of "
        "the alias"
      )
    if count > _MOST_VALUES:
      raise ValueError(
        f"{origin}: the key {key!r} and its aliases have more than {_MOST_VALUES:,} "
        "values: write fewer aliases"
      )
    inside = (*above, id(value))
    left += [(inner, f"{key}.{name}".lstrip("."), inside) for name, inner in pairs]


def lines(value: object) -> str:
  """Returns a value as YAML with one line per key, in the order of the value."""
  return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def inline(value: object) -> str:
  """Returns a value as YAML on one line."""
  options: dict[str, Any] = {"default_flow_style": True, "width": 10**6}
  text = yaml.dump(value, Dumper=_Dumper, allow_unicode=True, **options)
  return text.removesuffix("\n").removesuffix("\n...")


class _Loader(yaml.SafeLoader):
  """Loader of YAML 1.2: 1e-4 is a number, `no` and dates are texts.

  A key that is written twice in one mapping is an error.
  """

  yaml_implicit_resolvers: typing.ClassVar[dict] = {}

  def construct_mapping(self, node: Any, deep: bool = False) -> dict:
    keys: list[Any] = []
    for key_node, _ in node.value:
      key = self.construct_object(key_node, deep=True)
      if key in keys:
        raise yaml.constructor.ConstructorError(
          None, None, f"the key {key!r} is set twice", key_node.start_mark
        )
      keys.append(key)
    return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
  """Writer that quotes texts such as 1e-4 too, which only YAML 1.2 reads as numbers."""


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
_Dumper.add_implicit_resolver(
  "tag:yaml.org,2002:float",
  re.compile(f"^(?:{_SCALARS['float'][0]})$"),
  _SCALARS["float"][1],
)
_Loader.add_constructor(
  # YAML 1.1 would read 010 as eight.
  "tag:yaml.org,2002:int",
  lambda loader, node: int(str(node.value)),
)
