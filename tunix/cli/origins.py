"""`tunix train --print-config`: shows every value, and where it was set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tunix.cli import config as config_lib
from tunix.cli.settings import keys, spelling, yaml_text

_OLD = {new: old for old, new in (spelling.ALIASES | spelling.RENAMED).items()}


def describe(argv: Sequence[str]) -> str:
  """Returns the settings of a command line as YAML with the origin of each value.

  The origin is `default`, `FILE:LINE` or the argument, in a comment. `config.load`
  reads the YAML back to the same settings.

  Raises:
    FileNotFoundError, ValueError: as for `config.load`.
  """
  layers: dict[str, str] = {}
  config = config_lib.load(argv, layers)
  files = config_lib.parse_arguments(argv).files
  lines = {name: yaml_text.key_lines(name) for name in files}
  return "\n".join(_lines(keys.as_plain(config), "", _origins(layers, lines))) + "\n"


def _origins(
  layers: Mapping[str, str], lines: Mapping[str, Mapping[str, int]]
) -> dict[str, str]:
  origins = {}
  for key, layer in layers.items():
    numbers = lines.get(layer, {})
    line = numbers.get(key) or numbers.get(_OLD.get(key, ""))
    origins[key] = layer if line is None else f"{layer}:{line}"
  return origins


def _lines(
  values: Mapping[str, Any], prefix: str, origins: Mapping[str, str]
) -> Iterator[str]:
  indent = "  " * prefix.count(".")
  names = config_lib.known_keys()
  for name, value in values.items():
    dotted = f"{prefix}{name}"
    if isinstance(value, dict) and any(k.startswith(f"{dotted}.") for k in names):
      yield f"{indent}{name}:"
      yield from _lines(value, f"{dotted}.", origins)
    else:
      text = yaml_text.inline(value)
      yield f"{indent}{name}: {text}  # {origins.get(dotted, 'default')}"
