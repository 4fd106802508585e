"""Checks JSON against a schema with `jsonschema`; refuses schemas it cannot check.

The standard lets a validator ignore keywords and formats that it does not know. A
misspelt keyword would then give a reward to every text. Here schemas are checked
against a strict meta-schema, which allows only known keywords and formats.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any] | bool

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
# Keywords that are only annotations: validators never check the text against them.
_UNCHECKED = ["contentEncoding", "contentMediaType", "contentSchema"]


def parse(text: str) -> Any:
  """Parses JSON.

  Raises:
    ValueError: the text is not JSON (NaN and Infinity are not), or it is nested deeper
      than Python's recursion limit.
  """
  try:
    return json.loads(text, parse_constant=_no_constant)
  except RecursionError as error:
    raise ValueError("nested too deep") from error


def check_schema(schema: object) -> None:
  """Checks that `matches` can check every part of a schema.

  Raises:
    ValueError: the schema is not one of draft 2020-12, it has a keyword or format that
      cannot be checked, or a reference that is missing, leads to another document or
      is circular.
  """
  if not isinstance(schema, (Mapping, bool)):
    raise ValueError(f"schema is {schema!r}: expected an object or a bool")
  import referencing
  from referencing.jsonschema import DRAFT202012

  errors = _strict().iter_errors(schema)
  # Every object that contains a wrong part is also reported, as "unevaluated". The
  # error with the longest path is the innermost one, which is the cause.
  cause = max(errors, key=lambda e: len(e.absolute_path), default=None)
  if cause is not None:
    raise ValueError(
      f"the schema cannot be checked, at {cause.json_path}: {cause.message}; see draft "
      "2020-12 on json-schema.org"
    )
  resource = DRAFT202012.create_resource(schema)
  _check_references(resource, referencing.Registry().resolver_with_root(resource))
  try:
    _validator(schema).is_valid(None)
  except RecursionError as error:
    raise ValueError(
      "the schema has a reference that leads back to itself: remove the circle"
    ) from error


def matches(value: object, schema: Schema) -> bool:
  """Returns whether parsed JSON conforms to a schema that `check_schema` accepts."""
  try:
    return _validator(schema).is_valid(value)
  except RecursionError:  # a recursive schema descends as deep as the text
    return False


def first_error(value: object, schema: Schema) -> str | None:
  """Returns how parsed JSON differs from a schema; None if it conforms."""
  from jsonschema import exceptions

  try:
    error = exceptions.best_match(_validator(schema).iter_errors(value))
  except RecursionError:
    return "nested too deep"
  return None if error is None else error.message


def _no_constant(name: str) -> Any:
  raise ValueError(f"{name} is not JSON")


@functools.cache
def _dialect() -> Any:
  """Returns the validator class; importing jsonschema takes part of a second."""
  import jsonschema
  from jsonschema import validators

  # The library's `multipleOf` divides floats exactly, so that 0.3 is no multiple of
  # 0.1, and raises OverflowError for integers beyond 1.8e308.
  return validators.extend(
    jsonschema.Draft202012Validator, {"multipleOf": _multiple_of}
  )


def _validator(schema: Schema) -> Any:
  import referencing

  kind = _dialect()
  # The registry is empty, because the default one downloads references.
  return kind(
    schema, registry=referencing.Registry(), format_checker=kind.FORMAT_CHECKER
  )


@functools.cache
def _strict() -> Any:
  """Returns a validator of schemas; `$dynamicAnchor` makes inner schemas strict too."""
  import jsonschema_specifications

  kind = _dialect()
  meta = {
    "$schema": _DIALECT,
    "$id": "urn:tunix:strict-schema",
    "$dynamicAnchor": "meta",
    "$ref": _DIALECT,
    "properties": {"format": {"enum": sorted(kind.FORMAT_CHECKER.checkers)}},
    "propertyNames": {"not": {"enum": _UNCHECKED}},
    "unevaluatedProperties": False,
  }
  return kind(
    meta,
    registry=jsonschema_specifications.REGISTRY,
    format_checker=kind.FORMAT_CHECKER,
  )


def _check_references(resource: Any, resolver: Any) -> None:
  """Looks up every reference of a schema and of the schemas inside it."""
  from referencing.exceptions import Unresolvable

  if isinstance(resource.contents, Mapping):
    for keyword in {"$ref", "$dynamicRef"} & resource.contents.keys():
      reference = resource.contents[keyword]
      try:
        resolver.lookup(reference)
      except Unresolvable as error:
        raise ValueError(
          f'the schema refers to {reference!r}, which is missing: add it to its "$defs"'
        ) from error
  for inner in resource.subresources():
    _check_references(inner, resolver.in_subresource(inner))


def _multiple_of(
  _: object, step: float, value: Any, schema: Mapping[str, Any]
) -> Iterator[Any]:
  from jsonschema.exceptions import ValidationError

  number = isinstance(value, (int, float)) and not isinstance(value, bool)
  if number and not _is_multiple(value, step):
    yield ValidationError(f"{value!r} is not a multiple of {step}")


def _is_multiple(value: float, step: float) -> bool:
  if isinstance(value, int) and isinstance(step, int):
    return value % step == 0
  try:
    ratio = value / step
  except OverflowError:  # an integer beyond 1.8e308
    return False
  return math.isfinite(ratio) and math.isclose(ratio, round(ratio), rel_tol=1e-12)
