"""Readers of typed fields of a Hugging Face JSON file.

The file may come from a stranger. Every reader refuses a value of another kind or out
of range, and its message begins with the field, so that no such value reaches the model
or a loop that it would make endless.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunix.utils import checks

HfConfig = Mapping[str, Any]

# Lists of a configuration have one item per layer, and some tables one entry per
# expert. Published models have at most some hundreds of both.
_MOST_LAYERS = checks.Range(1, 4096)
EXPERTS = checks.Range(1, 65_536)
_MOST = 3.4e38  # the largest float32
_MOST_SHOWN = 120  # characters of a value in a message


def integer(
  hf: Mapping[str, Any], field: str, within: checks.Range = checks.COUNT
) -> int:
  """Returns a field that must be a whole number, at most 2^31 - 1.

  Args:
    hf: the parsed file, or a section of it.
    field: name of the field.
    within: allowed range.

  Raises:
    ValueError: the field is missing, has another kind of value or is out of range.
  """
  value = _present(hf, field)
  is_whole = isinstance(value, int | float) and not isinstance(value, bool)
  # The rest of infinity and of NaN is NaN.
  if not is_whole or value % 1 != 0 or not within.holds(value) or value >= 2**31:
    raise _refused(field, value, f"a whole number{within.words()}")
  return int(value)


def layers(hf: Mapping[str, Any]) -> int:
  """Returns the number of layers, `num_hidden_layers`.

  Raises:
    ValueError: see `integer`.
  """
  return integer(hf, "num_hidden_layers", _MOST_LAYERS)


def number(
  hf: Mapping[str, Any],
  field: str,
  default: float | None = None,
  within: checks.Range = checks.POSITIVE,
) -> float:
  """Returns a field that must be a number, or `default` if it is absent or null.

  Args:
    hf: the parsed file, or a section of it.
    field: name of the field.
    default: value of an absent field; None if the field is required.
    within: allowed range.

  Raises:
    ValueError: the field is missing and has no default, has another kind of value or is
      out of range.
  """
  if default is not None and hf.get(field) is None:
    return default
  value = _present(hf, field)
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  # A whole number of JSON may be too large for a float; NaN is not in the range.
  if not is_number or not abs(value) <= _MOST or not within.holds(value):
    raise _refused(field, value, f"a finite number{within.words()}")
  return float(value)


def flag(hf: Mapping[str, Any], field: str, default: bool = False) -> bool:
  """Returns a field that must be true or false, or `default` if it is absent.

  As in transformers, null means false. 0 and 1 are accepted.

  Raises:
    ValueError: the field has another kind of value.
  """
  value = hf.get(field, default)
  if value not in (True, False, None):
    raise _refused(field, value, "true or false")
  return bool(value)


def text(hf: Mapping[str, Any], field: str, default: str) -> str:
  """Returns a field that must be a text, or `default` if it is absent or null.

  Raises:
    ValueError: the field is empty or has another kind of value.
  """
  value = hf.get(field)
  if value is not None and (not isinstance(value, str) or not value):
    raise _refused(field, value, "a text")
  return value or default


def listed(hf: Mapping[str, Any], field: str) -> list[Any]:
  """Returns a field that must be a list; the list of an absent or null field is empty.

  Raises:
    ValueError: the field has another kind of value.
  """
  value = hf.get(field)
  if value is not None and not isinstance(value, list):
    raise _refused(field, value, "a list")
  return value or []


def table(hf: Mapping[str, Any], field: str) -> Mapping[str, Any]:
  """Returns a field that must be a table; that of an absent or null field is empty.

  Raises:
    ValueError: the field has another kind of value.
  """
  value = hf.get(field)
  if value is not None and not isinstance(value, Mapping):
    raise _refused(field, value, "a table")
  return value or {}


def _present(hf: Mapping[str, Any], field: str) -> Any:
  if hf.get(field) is None:
    raise ValueError(f"{field} is missing: the config must give it")
  return hf[field]


def _refused(field: str, value: object, expected: str) -> ValueError:
  shown = repr(value)
  if len(shown) > _MOST_SHOWN:
    shown = f"{shown[:_MOST_SHOWN]}..."
  return ValueError(f"{field} is {shown}, it must be {expected}")
