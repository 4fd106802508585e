"""Facts about a field of a settings dataclass, declared at the field itself.

The type, the default and the docstring of a field say what it means. `setting` adds
what the `tunix` command must know about it: whether the value is a path, whether it may
change when a run is resumed, and whether it is a key of the command at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from tunix.utils import attributes

_KEY = "tunix"


class Secret(NamedTuple):
  """A value that no option holds, because other users of a machine can list arguments.

  Attributes:
    read: function that reads the value from the file that the option names.
    variable: variable of the environment with the value, if no file is named.
  """

  read: Callable[[str], Any]
  variable: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
  """Facts that the command needs about a field, besides its type and meaning.

  Attributes:
    path: "read" if the value is a file, a folder or a hub id that exists before the
      run; "written" if it is a folder that the run creates; "data" if it is a source of
      records or a sequence of sources; "function" if it is a call string; "functions"
      if it is a call string or a sequence of them. None if the value is no path.
    names_model: the value is a model folder or a hub id.
    may_change: a resumed run may have another value. On a field that holds a section,
      it covers every key of the section.
    fingerprint: name in `data.json` of the digest of the content that the value names.
      A resumed run must find the same content, under whatever path. None if the content
      is not compared.
    python_only: the field is not a key of the command.
    in_command: default of the key, if it is not that of the field in Python.
    takes_object: a Python program may give an object in place of the path: a model, a
      tokenizer, records or a function.
    option: name of the option in commands other than `train`, if it is not the name of
      the field.
    positional: the value may be given without the name of the option.
    repeats: each item of a list has an option of its own: --proxy A --proxy B.
    secret: how the command gets a value that nobody may see; None: it is no secret.
  """

  path: Literal["read", "written", "data", "function", "functions"] | None = None
  names_model: bool = False
  may_change: bool = False
  fingerprint: str | None = None
  python_only: bool = False
  in_command: Any = None
  takes_object: bool = False
  option: str | None = None
  positional: bool = False
  repeats: bool = False
  secret: Secret | None = None


_NONE = Facts()


def setting(
  default: object = dataclasses.MISSING,
  *,
  default_factory: Callable[[], Any] | Any = dataclasses.MISSING,
  **facts: Any,
) -> Any:
  """Returns a dataclass field that carries `Facts`; `repr` leaves secrets out.

  Args:
    default: default value; without it and `default_factory` the field is required.
    default_factory: function that makes the default, as in `dataclasses.field`.
    **facts: attributes of `Facts`.

  Example:
    `max_steps: int | None = setting(None, may_change=True)`
  """
  metadata = {_KEY: Facts(**facts)}
  shared: Any = {"metadata": metadata, "repr": "secret" not in facts}
  if default_factory is not dataclasses.MISSING:
    return dataclasses.field(default_factory=default_factory, **shared)
  return dataclasses.field(default=default, **shared)


def model_setting(fingerprint: str) -> Any:
  """Returns the field of an optional model folder or hub id.

  A resumed run may have another path, if the content is the same.

  Args:
    fingerprint: see `Facts`.
  """
  return setting(
    None,
    path="read",
    names_model=True,
    may_change=True,
    fingerprint=fingerprint,
    takes_object=True,
  )


def facts_of(field: dataclasses.Field[Any]) -> Facts:
  """Returns the facts of a field; those of a plain field are all at their defaults."""
  return field.metadata.get(_KEY, _NONE)


def shared_values(kind: type, section: Any) -> dict[str, Any]:
  """Returns the values of `section` for the fields that the dataclass `kind` also has.

  Args:
    kind: a dataclass type.
    section: an instance of a dataclass.
  """
  own = {field.name for field in dataclasses.fields(kind)}
  names = [f.name for f in dataclasses.fields(section) if f.name in own]
  return attributes.of(section, names)
