"""Readers of the numbers of a Hugging Face JSON file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

HfConfig = Mapping[str, Any]


def integer(hf: Mapping[str, Any], field: str) -> int:
  """Returns a field that must be a whole number.

  Raises:
    ValueError: the field is missing or has another kind of value.
  """
  value = _present(hf, field)
  if isinstance(value, bool) or not isinstance(value, int | float) or value % 1:
    raise ValueError(f"{field} is {value!r}, it must be a whole number")
  return int(value)


def number(hf: Mapping[str, Any], field: str, default: float | None = None) -> float:
  """Returns a field that must be a number, or `default` if it is absent or null.

  Raises:
    ValueError: the field is missing and has no default, or has another kind of value.
  """
  if default is not None and hf.get(field) is None:
    return default
  value = _present(hf, field)
  kind = isinstance(value, int | float) and not isinstance(value, bool)
  if not kind or not math.isfinite(value):
    raise ValueError(f"{field} is {value!r}, it must be a finite number")
  return float(value)


def _present(hf: Mapping[str, Any], field: str) -> Any:
  if hf.get(field) is None:
    raise ValueError(f"{field} is missing: the config must give it")
  return hf[field]
