"""Matcher of regular expressions that come from strangers: its time has a bound.

Python's `re` tries the ways to match one after the other, and `(a|a)*b` has 2^n of
them for n letters. This matcher follows all ways at once, as sets of positions. It
reads Python's syntax, without what needs a single way: references to groups, atomic
groups, conditions, lookbehind and flags.
"""

from __future__ import annotations

import functools
import re
from typing import Any

_parser: Any = re._parser  # pyright: ignore[reportAttributeAccessIssue]
_MOST_CHARACTERS = 4096  # of a pattern
_MOST_STEPS = 20_000  # of one match, about 10 ms; published patterns take 2,000
_CATEGORIES = {
  "CATEGORY_DIGIT": r"\d",
  "CATEGORY_NOT_DIGIT": r"\D",
  "CATEGORY_SPACE": r"\s",
  "CATEGORY_NOT_SPACE": r"\S",
  "CATEGORY_WORD": r"\w",
  "CATEGORY_NOT_WORD": r"\W",
}
_WORD = "CATEGORY_WORD"
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT")
_CHARACTERS = ("LITERAL", "NOT_LITERAL", "ANY", "IN")


def matches(pattern: str, text: str) -> bool:
  """Returns True if a regular expression matches a whole text, as `re.fullmatch` does.

  Raises:
    ValueError: the pattern is no regular expression, has a part that this matcher does
      not support, or takes too many steps.
  """
  try:
    ends = _Match(pattern, text).ends(_parsed(pattern), 1)
  except RecursionError as error:
    raise ValueError(f"the pattern {pattern!r} nests too deeply: flatten it") from error
  return bool(ends >> len(text) & 1)


@functools.lru_cache(maxsize=8192)
def _parsed(pattern: str) -> tuple[Any, ...]:
  if len(pattern) > _MOST_CHARACTERS:
    raise ValueError(
      f"the pattern {pattern[:40]!r}... has {len(pattern):,} characters; expected at "
      f"most {_MOST_CHARACTERS:,}. Shorten it"
    )
  try:
    parsed = _parser.parse(pattern)
  except (re.error, OverflowError) as error:
    raise ValueError(
      f"{pattern!r} is no regular expression ({error}): correct it"
    ) from error
  if parsed.state.flags & ~re.UNICODE.value:
    raise _unsupported(pattern, "a flag")
  return tuple(parsed)


def _unsupported(pattern: str, part: str) -> ValueError:
  return ValueError(
    f"the pattern {pattern!r} has {part}, which patterns of a file may not have: list "
    "the names instead"
  )


class _Match:
  """One match. A set of positions is an integer with bit i for position i."""

  def __init__(self, pattern: str, text: str):
    self.pattern, self.text = pattern, text
    self.steps = 0
    # Of nodes for one character, by kind and argument; the tree keeps the ids alive.
    self.positions: dict[tuple[str, int], int] = {}
    self.all = (1 << len(text) + 1) - 1

  def ends(self, nodes: Any, starts: int) -> int:
    """Returns where matches of a sequence of nodes end that begin at `starts`."""
    for kind, argument in nodes:
      if not starts:
        return 0
      self.steps += 1 + (len(self.text) >> 10)
      if self.steps > _MOST_STEPS:
        raise ValueError(
          f"the pattern {self.pattern!r} takes more than {_MOST_STEPS:,} steps for "
          f"{self.text[:80]!r}: simplify it, or list the names instead"
        )
      starts = self.of_node(str(kind), argument, starts)
    return starts

  def of_node(self, kind: str, argument: Any, starts: int) -> int:
    """Returns where matches of one node end."""
    if kind in _CHARACTERS:
      return (starts & self.where(kind, argument)) << 1
    if kind == "AT":
      return starts & self.anchors(str(argument))
    if kind == "BRANCH":
      return functools.reduce(int.__or__, (self.ends(b, starts) for b in argument[1]))
    if kind == "SUBPATTERN" and not argument[1] and not argument[2]:
      return self.ends(argument[3], starts)
    if kind in _REPEATS:
      least, most, item = argument
      return self.repeated(least, int(most), item, starts)
    if kind in ("ASSERT", "ASSERT_NOT") and argument[0] > 0:
      ahead = sum(bit for bit in self.bits(starts) if self.ends(argument[1], bit))
      return starts & (ahead if kind == "ASSERT" else ~ahead)
    names = {"GROUPREF": "a reference to a group", "SUBPATTERN": "a flag"}
    raise _unsupported(self.pattern, names.get(kind, kind.lower().replace("_", " ")))

  def repeated(self, least: int, most: int, item: object, starts: int) -> int:
    """Returns where at least `least` and at most `most` matches in a row end.

    After one round per position the set of ends no longer changes.
    """
    rounds = len(self.text) + 1
    for _ in range(min(least, rounds)):
      starts = self.ends(item, starts)
    seen = new = starts
    for _ in range(min(most - least, rounds)):
      new = self.ends(item, new) & ~seen
      if not new:
        break
      seen |= new
    return seen

  def where(self, kind: str, argument: object) -> int:
    """Returns the positions of the characters that a node for one character takes."""
    key = kind, argument if isinstance(argument, int) else id(argument)
    if key not in self.positions:
      self.positions[key] = sum(
        1 << i for i, x in enumerate(self.text) if _takes(kind, argument, x)
      )
    return self.positions[key]

  def anchors(self, name: str) -> int:
    """Returns the positions where an anchor holds."""
    end = 1 << len(self.text)
    if name in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
      return 1
    if name == "AT_END_STRING" or (name == "AT_END" and not self.text.endswith("\n")):
      return end
    if name == "AT_END":
      return end | end >> 1
    words = self.where("CATEGORY", _WORD)
    edges = (words ^ words << 1) & self.all
    return edges if name == "AT_BOUNDARY" else self.all & ~edges

  @staticmethod
  def bits(positions: int) -> list[int]:
    """Returns the sets of one position each."""
    return [1 << i for i in range(positions.bit_length()) if positions >> i & 1]


def _takes(kind: str, argument: Any, character: str) -> bool:
  """Returns True if a node for one character takes this one."""
  code = ord(character)
  if kind == "ANY":
    return character != "\n"
  if kind == "LITERAL":
    return code == argument
  if kind == "NOT_LITERAL":
    return code != argument
  if kind == "RANGE":
    return argument[0] <= code <= argument[1]
  if kind == "CATEGORY":
    return re.fullmatch(_CATEGORIES[str(argument)], character) is not None
  is_other = str(argument[0][0]) == "NEGATE"
  inside = any(_takes(str(k), x, character) for k, x in argument[is_other:])
  return inside != is_other
