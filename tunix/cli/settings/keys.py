"""The keys that the fields of dataclasses are: names, types, defaults, meanings.

Everything that the command knows of its settings is read here, off the dataclasses of
the jobs: what a file may say, and what `--help`, `base_config.yaml` and the JSON Schema
tell about it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any

from tunix.cli.settings.convert import Choice, options, plain, section_of

REQUIRED = dataclasses.MISSING

# "name, other: what they mean", at the depth of the section "Attributes:".
_ENTRY = re.compile(r"^([a-z]\w*(?:, \w+)*): +(.*)$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
  """One key.

  Attributes:
    hint: type of the field.
    default: REQUIRED where there is none.
    meaning: from the dataclass's "Attributes:"; "" if it says nothing.
  """

  hint: Any
  default: Any
  meaning: str


@functools.cache
def of(section: type) -> dict[str, Key]:
  """The fields of a dataclass that a file can set, in order: not those of types that
  only Python has, and none that its `hidden` lists."""
  hints = typing.get_type_hints(section, include_extras=True)
  meanings = _meanings(section)
  return {
    field.name: Key(
      hint=hints[field.name],
      default=_default(field),
      meaning=meanings.get(field.name, ""),
    )
    for field in dataclasses.fields(section)
    if field.name not in vars_of(section, "hidden")
    and (options(hints[field.name]) or section_of(hints[field.name]))
  }


def vars_of(section: type, name: str) -> tuple[str, ...]:
  """What a dataclass and those that it extends list under `name`."""
  return tuple(entry for cls in section.__mro__ for entry in vars(cls).get(name, ()))


def walk(section: type, prefix: str = "") -> Iterator[tuple[str, str | None, Key]]:
  """(dotted key, name of the choice that has it or None, key), sections included."""
  for name, key in of(section).items():
    dotted, inner = f"{prefix}{name}", section_of(key.hint)
    yield dotted, None, key
    if isinstance(inner, Choice):
      for chosen, cls in inner.classes.items():
        for below, _, entry in walk(cls, f"{dotted}."):
          yield below, chosen, entry
    elif inner is not None:
      yield from walk(inner, f"{dotted}.")


def as_plain(section: Any) -> dict[str, Any]:
  """The keys of a section with their values, as YAML and JSON have them."""
  plain_values = {}
  for name, key in of(type(section)).items():
    value, inner = getattr(section, name), section_of(key.hint)
    if inner is None or value is None:
      plain_values[name] = plain(value)
    else:
      chosen = {"name": inner.name_of(value)} if isinstance(inner, Choice) else {}
      plain_values[name] = chosen | as_plain(value)
  return plain_values


def flatten(config: Any) -> dict[str, Any]:
  """{"training.max_steps": ...}; mappings whose keys nobody lists stay whole."""
  flat: dict[str, Any] = {}
  for name, value in as_plain(config).items():
    inner = section_of(of(type(config))[name].hint)
    if inner is None or value is None:
      flat[name] = value
    else:
      below = flatten(getattr(config, name))
      chosen = {"name": value["name"]} if isinstance(inner, Choice) else {}
      flat |= {f"{name}.{key}": entry for key, entry in (chosen | below).items()}
  return flat


def defaults(config: Any) -> dict[str, Any]:
  """What the keys of `flatten(config)` are by default; None where they are required."""
  values, found = flatten(config), {}
  for dotted, chosen, key in walk(type(config)):
    section = dotted.rpartition(".")[0]
    if chosen is None or values.get(f"{section}.name") == chosen:
      found[dotted] = None if key.default is REQUIRED else plain(key.default)
  return {dotted: found.get(dotted) for dotted in values}


@contextlib.contextmanager
def under(name: str, section: type) -> Iterator[None]:
  """Says what a dataclass says of its fields of the keys that they are.

  Args:
    name: key of the section; "": of the whole.
    section: whose fields are spoken of.

  Raises:
    ValueError: begins with the key.
  """
  try:
    yield
  except (TypeError, ValueError) as error:
    # Python's word for "not set", as files spell it.
    message, prefix = re.sub(r"\bor None\b", "or null", str(error)), f"{name}."
    if not name or message.startswith(prefix):
      raise ValueError(message) from error
    first = re.match(r"\w*", message)
    is_key = first is not None and first[0] in of(section)
    raise ValueError(f"{prefix if is_key else f'{name}: '}{message}") from error


def _default(field: dataclasses.Field) -> Any:
  made = field.default_factory
  return field.default if made is dataclasses.MISSING else made()


def _meanings(section: type) -> dict[str, str]:
  meanings: dict[str, str] = {}
  for cls in reversed(section.__mro__):
    # A dataclass without a docstring is given its signature.
    text = inspect.cleandoc(vars(cls).get("__doc__") or "")
    meanings |= _attributes(text)
  return meanings


def _attributes(text: str) -> dict[str, str]:
  """{name: meaning} of the section "Attributes:" (or "Args:") of a docstring."""
  meanings: dict[str, str] = {}
  names: list[str] = []
  _, _, body = re.sub(r"(?m)^Args:$", "Attributes:", text).partition("Attributes:\n")
  for line in body.splitlines():
    if line and not line.startswith(" "):
      break  # the next section
    if line.startswith("    "):  # an entry goes on
      meanings |= {name: f"{meanings[name]} {line.strip()}" for name in names}
    elif entry := _ENTRY.match(line.strip()):
      names = entry[1].split(", ")
      meanings |= dict.fromkeys(names, entry[2])
  return meanings
