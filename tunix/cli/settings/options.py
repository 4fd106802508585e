"""The options of a command: fields of dataclasses, set by flags and by files.

A `Section` names a dataclass whose fields are options. As with the keys of `tunix
train`, the declaration of a field gives the name, type, default and help of its option.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from tunix.cli.settings import convert, keys, yaml_text
from tunix.cli.settings.spelling import did_you_mean
from tunix.utils import env

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Section:
  """A dataclass whose fields are options of a command.

  Attributes:
    kind: the dataclass.
    prefix: beginning of the names of its options.
    without: fields that the command does not read.
    defaults: texts of defaults that the command chooses, by field.
  """

  kind: type
  prefix: str = ""
  without: tuple[str, ...] = ()
  defaults: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def options(self) -> dict[str, Option]:
    """Returns the options by field; those without a default come first."""
    listed = {
      field: Option(
        f"{self.prefix}{key.facts.option or field}", key, self.defaults.get(field)
      )
      for field, key in keys.of(self.kind).items()
      if field not in self.without
    }
    return dict(sorted(listed.items(), key=lambda item: not item[1].is_required))


@dataclasses.dataclass(frozen=True)
class Option:
  """An option.

  Attributes:
    name: name of the flag, without its dashes, and of the key in files.
    key: the field.
    default: text of the default, if the command chooses it.
  """

  name: str
  key: keys.Key
  default: str | None

  @property
  def is_required(self) -> bool:
    """True if the field has no default."""
    return self.key.default is keys.REQUIRED

  @property
  def hint(self) -> Any:
    """Type of the value that a user gives: for a secret, the name of a file."""
    return str if self.key.facts.secret else self.key.hint

  def add(self, group: Any) -> str:
    """Adds the flag to a group of a parser, and the argument without a name.

    Returns: the argument without a name, as usage shows it; "" if there is none.
    """
    facts, item = self.key.facts, convert.item_of(self.hint)
    shared: dict[str, Any] = {"default": argparse.SUPPRESS, "help": self._help()}
    kind = convert.placeholder(item or self.hint)
    if kind == convert.BOOL:
      shared["action"] = argparse.BooleanOptionalAction
    else:
      shared["metavar"] = "PATH" if facts.path or facts.secret else kind
      shared["choices"] = kind.split("|") if "|" in kind else None
    if item is not None and facts.repeats:
      shared["action"] = "append"
    elif item is not None:
      shared |= {"action": "extend", "nargs": "+"}
    group.add_argument(f"--{self.name}", dest=self.name, **shared)
    if not facts.positional:
      return ""
    bare, several = self.name.upper(), item is not None
    shared = {"nargs": "*" if several else "?", "default": argparse.SUPPRESS}
    group.add_argument(bare, help=f"The same as --{self.name}.", **shared)
    return f" {bare} [{bare} ...]" if several else f" {bare}"

  def _help(self) -> str:
    facts, text, default = self.key.facts, self.key.meaning, self.default
    parts = [keys.sentence(text)] if text else []
    if facts.secret is not None:
      parts.append("The value is in this file.")
      default = facts.secret.variable and f"the variable {facts.secret.variable}"
    elif default is None and self.key.default not in (keys.REQUIRED, None, (), {}):
      default = yaml_text.inline(convert.plain(self.key.default))
    if facts.repeats:
      parts.append("May be given several times.")
    if default is not None:
      parts.append(f"[{default}]")
    return " ".join(parts).replace("%", "%%")

  def of_flag(self, words: Any) -> Any:
    """Converts the texts of the command line.

    Raises:
      ValueError: the value has another type.
    """
    if isinstance(words, bool):
      return words

    def read(text: str, hint: object) -> Any:
      # Texts stay as they were typed: YAML takes quotation marks away.
      is_null = text == "null" and convert.takes_null(hint)
      is_text = {str, pathlib.Path} & {*convert.options(hint)} and not is_null
      value = text if is_text else yaml_text.argument(text)
      return convert.convert(value, hint, f"--{self.name}")

    item = convert.item_of(self.hint)
    return (
      read(words, self.hint) if item is None else tuple(read(x, item) for x in words)
    )

  def of_file(self, value: object, where: str) -> Any:
    """Converts a value of a file.

    Raises:
      ValueError: the value has another type. The value of a secret is not shown.
    """
    if self.key.facts.secret and not isinstance(value, str):
      raise ValueError(
        f"{where} is no text; expected the name of a file with the value"
      )
    return convert.convert(value, self.hint, where)


class Values:
  """The options that are set.

  Args:
    prog: the command, such as "tunix serve".
    sections: the sections of the command.
  """

  def __init__(self, prog: str, sections: Sequence[Section]):
    self._prog = prog
    self._of = {section.kind: section.options() for section in sections}
    self._options = {x.name: x for own in self._of.values() for x in own.values()}
    self._given: dict[str, Any] = {}
    self._where: dict[str, str] = {}  # how the user wrote each option

  def written(self, prefix: str) -> list[str]:
    """Returns the options that are set and begin so, each as a user wrote it."""
    return [where for name, where in self._where.items() if name.startswith(prefix)]

  def read_file(self, file: str) -> None:
    """Sets the options of a YAML file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: an unknown key, or a value of another type.
    """
    for name, value in _flat(yaml_text.read_file(file), self._options):
      if (option := self._options.get(name)) is None:
        remedy = did_you_mean(name, self._options, f"see {self._prog} --help")
        raise ValueError(f"{file}: the key {name!r} is unknown: {remedy}")
      # As in the files of a run, null means the default if the type has no null.
      if value is not None or convert.takes_null(option.hint):
        where = f"{file}: {name}"
        self._given[name], self._where[name] = option.of_file(value, where), where

  def read_flags(self, given: Mapping[str, Any]) -> None:
    """Sets the options of the command line, by name, or by NAME if they have none.

    Raises:
      ValueError: a value has another type, or an option is given with and without its
        name.
    """
    for name, option in self._options.items():
      bare, named = given.get(name.upper()), given.get(name)
      if bare and named is not None:
        raise ValueError(
          f"--{name} is {named} and {name.upper()} is {bare}: give one of them"
        )
      if bare or named is not None:
        self._where[name] = name.upper() if bare else f"--{name}"
        self._given[name] = option.of_flag(bare or named)

  def build(self, kind: type[T], **defaults: object) -> T:
    """Returns a dataclass with the options that are set.

    Args:
      kind: the dataclass of a section.
      **defaults: values of fields that are not set, in place of their defaults.

    Raises:
      OSError: the file of a secret cannot be read.
      ValueError: a value is missing or out of range; begins with the option.
    """
    values: dict[str, Any] = {}
    for field, option in self._of[kind].items():
      facts = option.key.facts
      if option.name in self._given:
        value = self._given[option.name]
        values[field] = facts.secret.read(value) if facts.secret else value
      elif field in defaults:
        values[field] = defaults[field]
      elif facts.secret is not None and facts.secret.variable is not None:
        values[field] = env.value(facts.secret.variable)
      elif facts.in_command is not None:
        values[field] = option.key.default
      elif option.is_required:
        name = option.name.upper() if facts.positional else f"--{option.name}"
        raise ValueError(f"{name} is missing: give it; see {self._prog} --help")
    with self._naming(self._of[kind]), keys.under("", kind):
      return kind(**{**defaults, **values})

  @contextlib.contextmanager
  def _naming(self, options: Mapping[str, Option]) -> Iterator[None]:
    """Puts the option in place of the field that an error begins with."""
    try:
      yield
    except ValueError as error:
      field = re.split(r"\W", str(error), maxsplit=1)[0]
      if field not in options:
        raise
      name = options[field].name
      where = self._where.get(name, f"--{name}")
      raise ValueError(f"{where}{str(error)[len(field) :]}") from error


def _flat(
  values: Mapping[str, Any], options: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
  """Yields (name, value) of a file; a mapping that is no value holds names."""
  for key, value in values.items():
    name = f"{prefix}{key}"
    if isinstance(value, dict) and name not in options:
      yield from _flat(value, options, f"{name}.")
    else:
      yield name, value
