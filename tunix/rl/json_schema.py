"""JSON against a schema, by `jsonschema`; what would go unchecked is refused.

The standard lets a validator pass over keywords and formats that it does not know, so a
typing error would reward everything. Here the schema of schemas is made strict.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any] | bool

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
# Annotations to a validator: what they say of a text is never looked at.
_UNCHECKED = ["contentEncoding", "contentMediaType", "contentSchema"]


def parse(text: str) -> Any:
  """The JSON in `text`.

  Raises:
    ValueError: not JSON; NaN and Infinity are not. Nested deeper than Python goes.
  """
  try:
    return json.loads(text, parse_constant=_no_constant)
  except RecursionError as error:
    raise ValueError("nested too deep") from error


def check_schema(schema: Any) -> None:
  """Refuses what `matches` would not look at.

  Raises:
    ValueError: not a schema of draft 2020-12; a keyword or format that is not checked;
      a reference to nowhere, to another document, or in a circle.
  """
  if not isinstance(schema, (Mapping, bool)):
    raise ValueError(f"a schema is an object or a bool, not {schema!r}")
  import referencing
  from referencing.jsonschema import DRAFT202012

  errors = _strict().iter_errors(schema)
  # Whatever holds a fault is "unevaluated" as well: the innermost error is the cause.
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
      "the schema refers to itself in a circle: it has no end"
    ) from error


def matches(value: Any, schema: Schema) -> bool:
  """Whether parsed JSON conforms to a schema that `check_schema` accepts."""
  try:
    return _validator(schema).is_valid(value)
  except RecursionError:  # a recursive schema follows the text as deep as it goes
    return False


def _no_constant(name: str) -> Any:
  raise ValueError(f"{name} is not JSON")


@functools.cache
def _dialect() -> Any:
  """The validator's class, which takes part of a second to import."""
  import jsonschema
  from jsonschema import validators

  # Theirs divides floats exactly, so that 0.3 is no multiple of 0.1, and raises
  # OverflowError for integers beyond all floats.
  return validators.extend(
    jsonschema.Draft202012Validator, {"multipleOf": _multiple_of}
  )


def _validator(schema: Schema) -> Any:
  import referencing

  kind = _dialect()
  # An empty registry: the default one fetches references from the network.
  return kind(
    schema, registry=referencing.Registry(), format_checker=kind.FORMAT_CHECKER
  )


@functools.cache
def _strict() -> Any:
  """Validates schemas. `$dynamicAnchor` makes all schemas within a schema strict."""
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
  """Looks up every reference of a schema and of those within it."""
  from referencing.exceptions import Unresolvable

  if isinstance(resource.contents, Mapping):
    for keyword in {"$ref", "$dynamicRef"} & resource.contents.keys():
      reference = resource.contents[keyword]
      try:
        resolver.lookup(reference)
      except Unresolvable as error:
        raise ValueError(
          f"the schema refers to {reference!r}, which is not in it: put it into its "
          '"$defs"'
        ) from error
  for inner in resource.subresources():
    _check_references(inner, resolver.in_subresource(inner))


def _multiple_of(
  _: Any, step: float, value: Any, schema: Mapping[str, Any]
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
  except OverflowError:  # an integer beyond all floats
    return False
  return math.isfinite(ratio) and math.isclose(ratio, round(ratio), rel_tol=1e-12)
