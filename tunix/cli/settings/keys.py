"""The keys of the command: the fields of the jobs' dataclasses, with their help.

All that the command knows about a key is declared at the field: its name, type and
default, its help under `Attributes:` of the docstring, and its `Facts`. What files may
contain, `--help`, `base_config.yaml` and the JSON Schema follow from the declarations.
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
from tunix.utils import attributes
from tunix.utils.setting import Facts, facts_of

REQUIRED = dataclasses.MISSING

# "name, other: meaning", at the indent of the section "Attributes:".
_ENTRY = re.compile(r"^([a-z]\w*(?:, \w+)*): +(.*)$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
  """One key.

  Attributes:
    hint: type of the field.
    default: default value; REQUIRED if the field has none.
    meaning: text of the dataclass's "Attributes:"; "" without one.
    facts: what else the command must know about the field.
  """

  hint: Any
  default: Any
  meaning: str
  facts: Facts = dataclasses.field(default=Facts())


@functools.cache
def of(section: type) -> dict[str, Key]:
  """Returns the keys of a dataclass, in order.

  A field is no key if it is declared `python_only`, or if a file cannot hold any value
  of its type, such as a function.
  """
  hints = typing.get_type_hints(section, include_extras=True)
  meanings = _meanings(section)
  return {
    field.name: Key(
      hint=hints[field.name],
      default=_default(field),
      meaning=meanings.get(field.name, ""),
      facts=facts_of(field),
    )
    for field in dataclasses.fields(section)
    if not facts_of(field).python_only
    and (options(hints[field.name]) or section_of(hints[field.name]))
  }


def walk(section: type, prefix: str = "") -> Iterator[tuple[str, str | None, Key]]:
  """Yields (dotted key, name of the choice or None, key), sections included.

  The name of the choice is set for keys that only one class of a `Choice` has.
  """
  for name, key in of(section).items():
    dotted, inner = f"{prefix}{name}", section_of(key.hint)
    yield dotted, None, key
    if isinstance(inner, Choice):
      for chosen, cls in inner.classes.items():
        for below, _, entry in walk(cls, f"{dotted}."):
          yield below, chosen, entry
    elif inner is not None:
      yield from walk(inner, f"{dotted}.")


def as_plain(section: object) -> dict[str, Any]:
  """Returns the keys of a section with their values, nested, as YAML and JSON types."""
  entries, plain_values = of(type(section)), {}
  for name, value in attributes.of(section, entries).items():
    inner = section_of(entries[name].hint)
    if inner is None or value is None:
      plain_values[name] = plain(value)
    else:
      chosen = {"name": inner.name_of(value)} if isinstance(inner, Choice) else {}
      plain_values[name] = chosen | as_plain(value)
  return plain_values


def flatten(config: object) -> dict[str, Any]:
  """Returns {"training.max_steps": ...}; a mapping with free keys is one value."""
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


def of_config(config: object) -> dict[str, Key]:
  """Returns the keys of a configuration, sections included, by dotted key.

  Below a `Choice` these are the keys of the chosen class.
  """
  values = flatten(config)
  return {
    dotted: key
    for dotted, chosen, key in walk(type(config))
    if chosen is None or values.get(f"{dotted.rpartition('.')[0]}.name") == chosen
  }


def defaults(config: object) -> dict[str, Any]:
  """Returns the defaults of the keys of `flatten(config)`; None for required keys."""
  entries = of_config(config)
  values = {
    dotted: entries[dotted].default for dotted in flatten(config) if dotted in entries
  }
  return {
    dotted: None if values.get(dotted, REQUIRED) is REQUIRED else plain(values[dotted])
    for dotted in flatten(config)
  }


def with_value(config: Any, key: str, value: object) -> Any:
  """Returns the settings with another value of a dotted key."""
  name, _, below = key.partition(".")
  if below:
    value = with_value(getattr(config, name), below, value)
  return dataclasses.replace(config, **{name: value})


def models(config: object) -> dict[str, str]:
  """Returns {dotted key: folder or hub id} of all models that a configuration names."""
  values = flatten(config)
  return {
    dotted: values[dotted]
    for dotted, key in of_config(config).items()
    # rl.critic may be "actor", which makes the critic from the policy.
    if key.facts.names_model and values.get(dotted) not in (None, "actor")
  }


@contextlib.contextmanager
def under(name: str, section: type) -> Iterator[None]:
  """Puts the key before the errors that a dataclass raises about its fields.

  Args:
    name: key of the section; "" for the whole configuration.
    section: the dataclass.

  Raises:
    ValueError: begins with the key.
  """
  try:
    yield
  except (TypeError, ValueError) as error:
    # "Not set" is None in Python and null in files.
    message, prefix = re.sub(r"\bor None\b", "or null", str(error)), f"{name}."
    if not name or message.startswith(prefix):
      raise ValueError(message) from error
    first = re.match(r"\w*", message)
    is_key = first is not None and first[0] in of(section)
    raise ValueError(f"{prefix if is_key else f'{name}: '}{message}") from error


@contextlib.contextmanager
def naming(config: object) -> Iterator[None]:
  """Puts the section before an error that begins with the name of one key of a run.

  The classes of the library name their arguments, and a command has keys.

  Raises:
    ValueError: begins with the dotted key.
  """
  try:
    yield
  except ValueError as error:
    named = re.match(r"(\w+) (?:is|are|has) ", str(error))
    name = None if named is None else named[1]
    owners = [key for key in flatten(config) if key.rpartition(".")[2] == name]
    if type(error) is not ValueError or len(owners) != 1:
      raise
    section = owners[0].rpartition(".")[0]
    raise ValueError(f"{section}.{error}" if section else str(error)) from error


def sentence(text: str) -> str:
  """Returns a sentence with YAML's names of values, a capital and a full stop.

  The first word keeps its lower case if it is a value, as in "null: ...".
  """
  for ours, theirs in (("None", "null"), ("True", "true"), ("False", "false")):
    text = re.sub(rf"\b{ours}\b", theirs, text)
  text = text.replace("`", "")
  if not re.match(r"[a-z]\w*[:_(]", text):
    text = f"{text[:1].upper()}{text[1:]}"
  return text if text.endswith(".") else f"{text}."


def _default(field: dataclasses.Field) -> Any:
  if (value := facts_of(field).in_command) is not None:
    return value
  factory = field.default_factory
  return field.default if factory is dataclasses.MISSING else factory()


def _meanings(section: type) -> dict[str, str]:
  meanings: dict[str, str] = {}
  for cls in reversed(section.__mro__):
    # `vars`, because a class without a docstring inherits none here, and a dataclass
    # without one gets its signature.
    text = inspect.cleandoc(vars(cls).get("__doc__") or "")
    meanings |= _attributes(text)
  return meanings


def _attributes(text: str) -> dict[str, str]:
  """Returns {name: meaning} of a docstring's section "Attributes:" or "Args:"."""
  meanings: dict[str, str] = {}
  names: list[str] = []
  _, _, body = re.sub(r"(?m)^Args:$", "Attributes:", text).partition("Attributes:\n")
  for line in body.splitlines():
    if line and not line.startswith(" "):
      break  # the next section
    if line.startswith("    "):  # a further line of an entry
      meanings |= {name: f"{meanings[name]} {line.strip()}" for name in names}
    elif entry := _ENTRY.match(line.strip()):
      names = entry[1].split(", ")
      meanings |= dict.fromkeys(names, entry[2])
  return meanings
