"""Limits of a `tokenizer.json`: growth of a text, and patterns that backtrack.

The package `tokenizers` runs the file's normalizers and patterns without a limit of
time or memory, and nothing can interrupt it. The limits are therefore checks of the
file before its first text.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from typing import Any

# Characters of the result for one of the text. Published files bound it by up to 594:
# NFKD and SentencePiece's map, one after the other (ALBERT, XLNet).
_MOST_GROWTH = 1024
# Growth of the fixed normalizers: NFKC makes 18 characters of U+FDFA, Bert's puts
# spaces around Chinese characters.
_GROWTH = {"NFD": 4, "NFKD": 18, "NFC": 3, "NFKC": 18, "BertNormalizer": 4}
_UNBOUNDED = re.compile(r"[*+]|\{\d*,\}")


def check(tokenizer: Any, file: str) -> None:
  """Refuses a tokenizer whose work has no bound.

  Args:
    tokenizer: a `tokenizers.Tokenizer`.
    file: its file, for messages.

  Raises:
    ValueError: texts grow too much, or a pattern repeats something that itself repeats.
  """
  for key in ("normalizer", "pre_tokenizer", "decoder"):
    part = getattr(tokenizer, key)
    if part is None:
      continue
    growth = 1
    for step in _steps(json.loads(part.__getstate__())):
      pattern = step.get("pattern")
      source = pattern.get("Regex") if isinstance(pattern, dict) else None
      if source is not None and _nests_repeats(source):
        raise ValueError(
          f"{file}: {key} has the pattern {source[:80]!r}, which repeats a group that "
          "itself repeats or chooses: its time has no bound. Use another tokenizer"
        )
      growth *= _growth(step)
      if growth > _MOST_GROWTH:
        raise ValueError(
          f"{file}: {key} may make a text {growth:,} times as long; expected at most "
          f"{_MOST_GROWTH} times. Use another tokenizer"
        )


def _steps(part: object) -> Iterator[dict[str, Any]]:
  """Returns the steps of a part, those of sequences within sequences, too."""
  left = [part]
  while left:
    step = left.pop()
    if isinstance(step, dict):
      yield step
      for name in ("normalizers", "pretokenizers", "decoders"):
        left += step.get(name) or []


def _growth(step: dict[str, Any]) -> int:
  """Returns a bound of the characters that a step makes of one character."""
  kind = step.get("type")
  if kind == "Replace":
    pattern, content = step.get("pattern") or {}, str(step.get("content") or "")
    width = len(pattern.get("String") or "") or _width(pattern.get("Regex") or "")
    # A pattern without width matches between all characters.
    return max(1, -(-len(content) // width) if width else 1 + len(content))
  if kind == "Prepend":
    return 1 + len(str(step.get("prepend") or ""))
  if kind == "Precompiled":
    return _longest(str(step.get("precompiled_charsmap") or ""))
  return _GROWTH.get(str(kind), 1)


def _longest(charsmap: str) -> int:
  """Returns the bytes of the longest text in a map of SentencePiece.

  The map is the size of a trie in 4 bytes, the trie, and texts that end with a 0.
  """
  raw = base64.b64decode(charsmap)
  texts = raw[4 + int.from_bytes(raw[:4], "little") :]
  return max(1, *map(len, texts.split(b"\0")), 1)


def _width(pattern: str) -> int:
  """Returns the least number of characters of a match, 0 if it is unknown."""
  parser: Any = re._parser  # pyright: ignore[reportAttributeAccessIssue]
  try:
    return parser.parse(pattern).getwidth()[0]
  except (re.error, OverflowError, RecursionError):  # a pattern that Python lacks
    return 0


def _nests_repeats(pattern: str) -> bool:
  """Returns True if a repeated group holds a repeat or a choice, as in `(a+)*`.

  Such a group may match one text in exponentially many ways.
  """
  # Classes and escapes hold no groups. An escape such as \\p{L} becomes one letter.
  plain = re.sub(r"\\[pP]\{[^}]*\}|\\.", "x", pattern, flags=re.DOTALL)
  plain = _without_classes(plain)
  open_groups, i = [False], 0  # True: the group holds a repeat or a choice
  while i < len(plain):
    letter, i = plain[i], i + 1
    if letter == "(":
      open_groups.append(False)
    elif letter == "|":
      open_groups[-1] = len(open_groups) > 1
    elif letter == ")" and len(open_groups) > 1:
      inside = open_groups.pop()
      repeat = _UNBOUNDED.match(plain, i)
      if inside and repeat:
        return True
      open_groups[-1] |= inside
    elif _UNBOUNDED.match(plain, i - 1):
      open_groups[-1] = True
  return False


def _without_classes(pattern: str) -> str:
  """Returns a pattern with each class `[...]` as one letter; classes may nest."""
  out, depth, start = [], 0, False
  for letter in pattern:
    if letter == "[":
      depth, start = depth + 1, True
      out += ["x"] if depth == 1 else []
    elif depth and letter == "]" and not start:
      depth -= 1
    else:
      start = start and letter == "^"
      out += [] if depth else [letter]
  return "".join(out)


class without_panic:
  """Makes a panic of Rust, which is no `Exception`, a ValueError.

  tokenizers panics if a pattern takes more than ten million steps at one place. A class
  and not a generator, because every text passes here.
  """

  __slots__ = ("folder",)

  def __init__(self, folder: str | None):
    self.folder = folder

  def __enter__(self) -> None:
    return None

  def __exit__(self, kind: Any, error: BaseException | None, trace: object) -> None:
    if kind is not None and kind.__name__ == "PanicException":
      raise ValueError(
        f"{self.folder or 'the tokenizer'}: tokenizer.json fails on this text "
        f"({error}): use another tokenizer, or leave the text out"
      ) from error
