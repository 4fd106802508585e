"""JSON against a schema: the common keywords of JSON Schema, and no others.

An unknown keyword is refused when the schema is read, so that no part of a schema goes
unchecked. References, formats and dynamic parts are not here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

Schema = Mapping[str, Any] | bool


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
    ValueError: a keyword or type that is not known, a pattern that does not compile.
  """
  if isinstance(schema, bool):
    return
  if not isinstance(schema, Mapping):
    raise ValueError(f"a schema is an object or a bool, not {schema!r}")
  unknown = set(schema) - set(_KEYWORDS) - _ANNOTATIONS
  if unknown:
    raise ValueError(
      f"the schema's keywords {sorted(unknown)} are not known; there are "
      f"{sorted(_KEYWORDS)}"
    )
  for name in _list(schema.get("type", [])):
    if name not in _TYPES:
      raise ValueError(f"the type {name!r} is not known; there are {sorted(_TYPES)}")
  if "pattern" in schema:
    re.compile(schema["pattern"])
  below = [schema[k] for k in ("items", "not", "additionalProperties") if k in schema]
  for keyword in ("anyOf", "allOf", "oneOf"):
    below += schema.get(keyword, [])
  for inner in [*below, *schema.get("properties", {}).values()]:
    check_schema(inner)


def matches(value: Any, schema: Schema) -> bool:
  """Whether parsed JSON conforms to a schema that `check_schema` accepts."""
  if isinstance(schema, bool):
    return schema
  return all(
    _KEYWORDS[keyword](value, argument, schema)
    for keyword, argument in schema.items()
    if keyword in _KEYWORDS
  )


def equal(a: Any, b: Any) -> bool:
  """Equality of JSON: 1 is 1.0, but true is not 1."""
  if isinstance(a, bool) or isinstance(b, bool):
    return a is b
  if isinstance(a, list) and isinstance(b, list):
    return len(a) == len(b) and all(map(equal, a, b))
  if isinstance(a, dict) and isinstance(b, dict):
    return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
  return a == b


def _no_constant(name: str) -> Any:
  raise ValueError(f"{name} is not JSON")


def _list(x: Any) -> list[Any]:
  return [x] if isinstance(x, str) else list(x)


def _is_number(x: Any) -> bool:
  return isinstance(x, (int, float)) and not isinstance(x, bool)


def _is_integer(x: Any) -> bool:
  return _is_number(x) and (isinstance(x, int) or x.is_integer())


_TYPES: dict[str, Callable[[Any], bool]] = {
  "object": lambda x: isinstance(x, dict),
  "array": lambda x: isinstance(x, list),
  "string": lambda x: isinstance(x, str),
  "number": _is_number,
  "integer": _is_integer,
  "boolean": lambda x: isinstance(x, bool),
  "null": lambda x: x is None,
}

_ANNOTATIONS = {"$schema", "$id", "$comment", "title", "description", "default"}
_ANNOTATIONS |= {"examples"}


def _of(kind: str, check: Callable[[Any, Any], bool]) -> Callable[..., bool]:
  """A keyword that speaks of one type, and lets the others pass."""
  return lambda value, argument, _: not _TYPES[kind](value) or check(value, argument)


def _additional(value: Any, inner: Schema, schema: Mapping[str, Any]) -> bool:
  if not isinstance(value, dict):
    return True
  known = schema.get("properties", {})
  return all(matches(v, inner) for k, v in value.items() if k not in known)


def _properties(value: dict[str, Any], inner: Mapping[str, Schema]) -> bool:
  return all(matches(value[k], s) for k, s in inner.items() if k in value)


def _multiple(value: float, step: float) -> bool:
  if isinstance(value, int) and isinstance(step, int):
    return value % step == 0
  try:
    ratio = value / step
  except OverflowError:  # an integer beyond all floats
    return False
  return math.isfinite(ratio) and math.isclose(ratio, round(ratio), rel_tol=1e-12)


# keyword -> check(value, the keyword's argument, the schema around it)
_KEYWORDS: dict[str, Callable[[Any, Any, Mapping[str, Any]], bool]] = {
  "type": lambda x, names, _: any(_TYPES[name](x) for name in _list(names)),
  "enum": lambda x, choices, _: any(equal(x, c) for c in choices),
  "const": lambda x, constant, _: equal(x, constant),
  "properties": _of("object", _properties),
  "required": _of("object", lambda x, names: all(name in x for name in names)),
  "additionalProperties": _additional,
  "minProperties": _of("object", lambda x, n: len(x) >= n),
  "maxProperties": _of("object", lambda x, n: len(x) <= n),
  "items": _of("array", lambda x, inner: all(matches(v, inner) for v in x)),
  "minItems": _of("array", lambda x, n: len(x) >= n),
  "maxItems": _of("array", lambda x, n: len(x) <= n),
  "minLength": _of("string", lambda x, n: len(x) >= n),
  "maxLength": _of("string", lambda x, n: len(x) <= n),
  "pattern": _of("string", lambda x, p: re.search(p, x) is not None),
  "minimum": _of("number", lambda x, n: x >= n),
  "maximum": _of("number", lambda x, n: x <= n),
  "exclusiveMinimum": _of("number", lambda x, n: x > n),
  "exclusiveMaximum": _of("number", lambda x, n: x < n),
  "multipleOf": _of("number", _multiple),
  "anyOf": lambda x, inner, _: any(matches(x, s) for s in inner),
  "allOf": lambda x, inner, _: all(matches(x, s) for s in inner),
  "oneOf": lambda x, inner, _: sum(matches(x, s) for s in inner) == 1,
  "not": lambda x, inner, _: not matches(x, inner),
}
