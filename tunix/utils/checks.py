"""Checks of numbers in public settings and arguments: type, range, finiteness.

A dataclass of settings calls `fields(self, ...)` first, which reads the types off its
annotations. Functions check their arguments with `number` and `listed`.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import math
import numbers
import re
import types
import typing
from typing import Any, NamedTuple

from tunix.utils.setting import named_values

_INT32, _FLOAT32 = 2**31 - 1, 3.4028234e38
_LEAST = 1e-37  # dividing by a denormal float32 gives infinity, as dividing by 0 does
# Names that are said with a vowel first: int, Array, RLLearner, ndarray.
_TAKES_AN = re.compile("(?!one)[aeio]|(?-i:[FHLMNRSX][A-Z])|ndarray", re.IGNORECASE)
_LISTS = (tuple, list, collections.abc.Sequence)


class Range(NamedTuple):
  """The numbers from `low` to `high`.

  Attributes:
    low, high: the bounds. An infinite bound allows every finite number.
    beyond: if True, `low` itself is excluded.
    below: if True, `high` itself is excluded.
  """

  low: float = -math.inf
  high: float = math.inf
  beyond: bool = False
  below: bool = False

  def holds(self, value: Any) -> bool:
    """Returns True if a number is in the range."""
    over = value > self.low if self.beyond else value >= self.low
    return over and (value < self.high if self.below else value <= self.high)

  def words(self) -> str:
    """Returns the range as text that follows "a number", such as " above 0"."""
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
  """The values that the annotation of a field allows.

  Attributes:
    whole: True for int, False for float; None: the field holds no number.
    items: type of the items of a list; None: the field holds no list.
    flag: True if the field holds a bool.
    others: other types of the annotation, such as None, str or a function type.
  """

  whole: bool | None
  items: Any
  flag: bool
  others: tuple[Any, ...]


def fields(config: object, **ranges: Range) -> None:
  """Checks the numbers, lists and bools of a dataclass against its annotations.

  Args:
    config: the dataclass.
    **ranges: {field: range}, for a number or for each number of a list. A field without
      a range takes any finite number of its type.

  Raises:
    TypeError: a value is no number, no list, or no bool. The message has the field, its
      value and the expectation.
    ValueError: a number is out of range.
  """
  kinds = _kinds(type(config))
  for name, value in named_values(config, kinds).items():
    kind = kinds[name]
    if value is None and type(None) in kind.others:
      continue
    if kind.flag:
      _flag(name, value)
    # A number is a list for no field, but some fields take numbers besides lists.
    is_number = isinstance(value, numbers.Number) and (
      kind.whole is not None or type(value) in kind.others
    )
    is_list = kind.items is not None and not is_number
    if is_list and not (isinstance(value, str) and str in kind.others):
      listed(name, value, kind.items, ranges.get(name, ANY))
    elif kind.whole is not None and not _is_other(value, kind):
      number(
        name,
        value,
        ranges.get(name, ANY),
        whole=kind.whole,
        optional=type(None) in kind.others,
      )


def _flag(name: str, value: object) -> None:
  if type(value).__name__ not in ("bool", "bool_"):  # of Python or NumPy
    raise TypeError(f"{name} is {value!r}: it must be True or False")


def _is_other(value: object, kind: _Kind) -> bool:
  """Returns True if a value is of a type that a field allows besides numbers."""
  if isinstance(value, str):
    return str in kind.others
  return not isinstance(value, numbers.Number) and any(
    other is not type(None) for other in kind.others
  )


def type_of(value: object) -> str:
  """Returns the type of a value with its article, for messages: "an int", "a list"."""
  name = type(value).__name__
  if value is None:
    return name.removesuffix("Type")
  return f"{'an' if _TAKES_AN.match(name) else 'a'} {name}"


def number(
  name: str,
  value: object,
  within: Range = ANY,
  *,
  whole: bool = False,
  optional: bool = False,
) -> None:
  """Checks one number.

  Args:
    name: name of the value in the message.
    value: a number of Python or NumPy. A bool is not a number here.
    within: allowed range. A whole number without an upper bound must fit into int32,
      the type of JAX's integer arrays.
    whole: if True, the number must be an integer.
    optional: if True, None is allowed.

  Raises:
    TypeError: the value is no number.
    ValueError: the number is out of range, or infinite or 0 when rounded to float32.
  """
  if value is None and optional:
    return
  is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
  if is_number and (isinstance(value, numbers.Integral) or not whole):
    most = max(_INT32, within.high if within.high < math.inf else 0)
    size: Any = abs(typing.cast(Any, value))
    fits = size <= (most if whole else _FLOAT32) and (size == 0 or size > _LEAST)
    if fits and within.holds(value):
      return
  what = "a whole number" if whole else "a finite number"
  is_tiny = is_number and not whole and 0 < abs(typing.cast(Any, value)) <= _LEAST
  ending = f", and 0 or more than {_LEAST:g} away from 0" if is_tiny else ""
  ending += ", or None" if optional else ""
  error = ValueError if is_number else TypeError
  raise error(f"{name} is {value!r}: it must be {what}{within.words()}{ending}")


def pattern(name: str, text: str) -> None:
  """Checks that a text is a regular expression.

  Raises:
    ValueError: it is none; the message says why.
  """
  try:
    re.compile(text)
  except re.error as error:
    raise ValueError(
      f"{name} {text!r} is no regular expression: {error}. Correct it"
    ) from error


def listed(name: str, value: object, items: object, within: Range = ANY) -> None:
  """Checks a list and its items.

  Args:
    name: name of the value in the message.
    value: any sequence, set or array. A text is not a list.
    items: type of the items. Items are checked if it is int, float (finite) or str.
    within: allowed range of items that are numbers.

  Raises:
    TypeError: the value is no list, or an item has another type.
    ValueError: an item is a number out of range.
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
      number(f"{name}[{i}]", item, within, whole=items is int)
    elif not isinstance(item, str):
      raise TypeError(f"{name}[{i}] is {item!r}: it must be a text")


@functools.cache
def _kinds(config: type) -> dict[str, _Kind]:
  """Returns {field: allowed values} of the fields that are checked, once per class."""
  hints = typing.get_type_hints(config)
  kinds = {
    field.name: _kind(hints[field.name])
    for field in dataclasses.fields(config)
    if field.init
  }
  return {
    name: kind
    for name, kind in kinds.items()
    if kind.whole is not None or kind.items is not None or kind.flag
  }


def _kind(hint: object) -> _Kind:
  union = typing.get_origin(hint) in (typing.Union, types.UnionType)
  members = typing.get_args(hint) if union else (hint,)
  numeric = [member for member in members if member in (int, float)]
  lists = [member for member in members if typing.get_origin(member) in _LISTS]
  items = typing.get_args(lists[0])[0] if lists else None
  others = tuple(x for x in members if x not in numeric and x not in lists)
  # A float field takes whole numbers, too, so float wins if both are named.
  flag = bool in members and {bool, types.NoneType}.issuperset(members)
  return _Kind(None if not numeric else float not in numeric, items, flag, others)
