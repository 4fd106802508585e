"""The one way in which numbers are checked at a public door: kind, range, finite.

A dataclass of settings calls `fields(self, ...)` first; the kinds of its numbers are
read off its annotations. Arguments of a function go through `number` and `listed`.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import math
import numbers
import types
import typing
from typing import Any, NamedTuple

_INT32, _FLOAT32 = 2**31 - 1, 3.4028234e38
_LISTS = (tuple, list, collections.abc.Sequence)


class Range(NamedTuple):
  """The numbers from `low` to `high`.

  Attributes:
    low, high: the bounds; infinite ones bound nothing, as numbers are finite anyway.
    beyond: `low` itself is left out.
    below: `high` itself is left out.
  """

  low: float = -math.inf
  high: float = math.inf
  beyond: bool = False
  below: bool = False

  def holds(self, value: Any) -> bool:
    """Whether a number is in the range."""
    over = value > self.low if self.beyond else value >= self.low
    return over and (value < self.high if self.below else value <= self.high)

  def words(self) -> str:
    """Follows "a number"."""
    if self.high == math.inf:
      if self.low == -math.inf:
        return ""
      return f" above {self.low:g}" if self.beyond else f" of at least {self.low:g}"
    start = "above" if self.beyond else "from"
    high = f"{self.high:.0f}" if self.high % 1 == 0 else f"{self.high:g}"
    return f" {start} {self.low:g} {'and below' if self.below else 'to'} {high}"


ANY = Range()
COUNT = Range(1)
NOT_NEGATIVE = Range(0)
POSITIVE = Range(0, beyond=True)
SHARE = Range(0, 1)
SEED = Range(0, 2**32 - 1)
BYTES = Range(1, 2**63 - 1)


class _Kind(NamedTuple):
  """What an annotation says of a field's numbers.

  Attributes:
    whole: an int; None: the field holds no number.
    items: the type of what a list of the field holds; None: it holds no list.
    others: what the field may hold besides, such as None, a text or a function.
  """

  whole: bool | None
  items: Any
  others: tuple[Any, ...]


def fields(config: Any, **ranges: Range) -> None:
  """Checks every number, and every list, of a dataclass by its annotations.

  Args:
    config: the dataclass.
    **ranges: of its fields; without one any finite number of the kind passes.

  Raises:
    TypeError: no number, or no list; names the field, its value and what it must be.
    ValueError: another number than it must be.
  """
  for name, kind in _kinds(type(config)).items():
    value = getattr(config, name)
    if value is None and type(None) in kind.others:
      continue
    is_list = kind.items is not None and not isinstance(value, numbers.Number)
    if is_list and not (isinstance(value, str) and str in kind.others):
      listed(name, value, kind.items)
    elif kind.whole is not None and not _is_other(value, kind):
      number(
        name,
        value,
        ranges.get(name, ANY),
        whole=kind.whole,
        optional=type(None) in kind.others,
      )


def _is_other(value: Any, kind: _Kind) -> bool:
  """Whether a value is of the types that a field holds besides numbers."""
  if isinstance(value, str):
    return str in kind.others
  return not isinstance(value, numbers.Number) and any(
    other is not type(None) for other in kind.others
  )


def number(
  name: str,
  value: Any,
  within: Range = ANY,
  *,
  whole: bool = False,
  optional: bool = False,
) -> None:
  """Refuses what is no number of the kind and in the range.

  Args:
    name: for the message.
    value: Python's or NumPy's number; true and false are none.
    within: the range; a whole number without a bound must fit int32, as arrays have it.
    whole: it must be an integer.
    optional: None passes as well.

  Raises:
    TypeError: no number.
    ValueError: another number; also one that is infinite or 0 in float32.
  """
  if value is None and optional:
    return
  is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
  if is_number and (isinstance(value, numbers.Integral) or not whole):
    most = max(_INT32, within.high if within.high < math.inf else 0)
    size: Any = abs(typing.cast(Any, value))
    # A denormal number divides as 0 does.
    fits = size <= (most if whole else _FLOAT32) and (size == 0 or size > 1e-37)
    if fits and within.holds(value):
      return
  what = "a whole number" if whole else "a finite number"
  ending = ", or None" if optional else ""
  error = ValueError if is_number else TypeError
  raise error(f"{name} is {value!r}: it must be {what}{within.words()}{ending}")


def listed(name: str, value: Any, items: Any) -> None:
  """Refuses what is no list, and lists of something else.

  Args:
    name: for the message.
    value: any sequence, set or array; a text is one thing, not a list of letters.
    items: what it holds: int and float (finite) and str are looked at.

  Raises:
    TypeError: no list, or something else in it.
    ValueError: a number in it that is not of the kind.
  """
  is_list = isinstance(value, collections.abc.Iterable) and not isinstance(
    value, str | bytes | collections.abc.Mapping
  )
  if not is_list:
    raise TypeError(f"{name} is {value!r}: it must be a list, such as [{value!r}]")
  if items not in (int, float, str):
    return
  for i, item in enumerate(value):
    if items is not str:
      number(f"{name}[{i}]", item, whole=items is int)
    elif not isinstance(item, str):
      raise TypeError(f"{name}[{i}] is {item!r}: it must be a text")


@functools.cache
def _kinds(config: type) -> dict[str, _Kind]:
  """The fields that hold numbers or lists. Strings are resolved once a class."""
  hints = typing.get_type_hints(config)
  kinds = {
    field.name: _kind(hints[field.name])
    for field in dataclasses.fields(config)
    if field.init
  }
  return {
    name: kind
    for name, kind in kinds.items()
    if kind.whole is not None or kind.items is not None
  }


def _kind(hint: Any) -> _Kind:
  union = typing.get_origin(hint) in (typing.Union, types.UnionType)
  members = typing.get_args(hint) if union else (hint,)
  numeric = [member for member in members if member in (int, float)]
  lists = [member for member in members if typing.get_origin(member) in _LISTS]
  items = typing.get_args(lists[0])[0] if lists else None
  others = tuple(x for x in members if x not in numeric and x not in lists)
  # "float" takes whole numbers too, so it decides where both are named.
  return _Kind(None if not numeric else float not in numeric, items, others)
