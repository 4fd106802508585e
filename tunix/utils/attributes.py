"""Attributes of an object by name, for code that works on a table of names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any


def of(owner: object, names: Iterable[str]) -> dict[str, Any]:
  """Returns {name: attribute}.

  Raises:
    AttributeError: `owner` has no attribute of one of the names.
  """
  return {name: getattr(owner, name) for name in names}


def known(owner: object, names: Iterable[str]) -> dict[str, Any]:
  """Returns {name: attribute} of the attributes that are not None.

  Raises:
    AttributeError: see `of`.
  """
  return {name: x for name, x in of(owner, names).items() if x is not None}


def of_fields(instance: Any) -> dict[str, Any]:
  """Returns {field: value} of a dataclass; unlike `asdict`, it copies no value."""
  return of(instance, [field.name for field in dataclasses.fields(instance)])
