"""A pass over the data before training, so that bad input fails in the first minute.

Renders and tokenises record by record and keeps only counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tunix.data import forms
from tunix.data.mixture import describe
from tunix.data.records import KINDS
from tunix.data.source import Source
from tunix.utils import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """Counts over the scanned records.

  Attributes:
    kind: name of what they were read as.
    records: records in the data set.
    scanned: records that were looked at.
    kept: those that training will see.
    dropped: left out because they are too long.
    truncated: kept, but some of their tokens lost.
    empty: left out because a completion says nothing.
    equal: left out because chosen and rejected are the same.
    tokens: tokens of what is kept; prompts that stand apart are not counted.
    trained_tokens: those of them that are learned or scored.
    longest: tokens before cutting, by what is limited ("record", or "prompt" and
      "completion").
    longest_at: their places.
    desirable: kept completions with the label true; None where there are no labels.
    mixed: shares of the parts of a mixture, in words.
    forms: of other libraries that records have (see `tunix.data.forms`).
  """

  kind: str
  records: int
  scanned: int
  kept: int
  dropped: int
  truncated: int
  empty: int
  equal: int
  tokens: int
  trained_tokens: int
  longest: dict[str, int]
  longest_at: dict[str, str]
  desirable: int | None
  mixed: Sequence[str] = ()
  forms: Sequence[str] = ()

  @property
  def longest_prompt(self) -> int:
    """Tokens of the longest prompt; 0 where prompts do not stand apart."""
    return self.longest.get("prompt", 0)

  @property
  def undesirable(self) -> int:
    """Kept completions with the label false."""
    return self.kept - (self.desirable or 0)

  def __str__(self) -> str:
    kind = KINDS[self.kind]
    part = "" if self.scanned == self.records else f" ({self.scanned:,} looked at)"
    counts = {
      "dropped": self.dropped,
      "truncated": self.truncated,
      "with an empty completion left out": self.empty,
      "with equal completions left out": self.equal,
    }
    always = ("dropped", "truncated") if kind.name == "sft" else ()
    parts = [f"{self.records:,} {kind.noun}{part}: {self.kept:,} kept"]
    parts += [f"{n:,} {name}" for name, n in counts.items() if n or name in always]
    if self.forms:
      parts.append(f"read as {' and '.join(self.forms)} have them")
    text = ", ".join(parts)
    if kind.name == "sft":
      text += f"; {self.tokens:,} tokens, {self.trained_tokens:,} of them trained"
    elif kind.completions:
      text += f"; {self.tokens:,} tokens of completions"
    text += "; " + ", ".join(
      f"the longest {what if kind.name != 'sft' else ''}".rstrip()
      + f" has {self.longest[what]:,} ({self.longest_at[what]})"
      for what in self.longest
    )
    if self.desirable is not None:
      text += f"; {self.desirable:,} desirable, {self.undesirable:,} undesirable"
    return "; ".join([text, *self.mixed])


def scan(source: Source, limit: int | None = None) -> Report:
  """Looks at every record, or at no more than `limit` spread over the data.

  Raises:
    ValueError: a record is wrong or cannot be trained on (its place is named), some
      have a margin and others none, none of those scanned is left, or `limit` is not
      positive.
  """
  checks.number("limit", limit, checks.COUNT, whole=True, optional=True)
  stride = 1 if limit is None else -(-len(source) // limit)
  indices = range(0, len(source), stride)
  names = ("kept", "dropped", "truncated", "empty", "equal", "tokens", "trained_tokens")
  counts: dict[str, int] = dict.fromkeys((*names, "desirable"), 0)
  longest: dict[str, tuple[int, int]] = {}
  margin, known = None, set()
  for index in indices:
    if (form := forms.find(source.records[index], *source.kind.forms)) is not None:
      known.add(form.name)
    rendered = source.render(index)
    has_margin = "margin" in rendered.extra
    if margin not in (None, has_margin):
      raise ValueError(
        f'{source.where(index)}: {"a" if has_margin else "no"} "margin", unlike the '
        "records before: give all of them one, or none"
      )
    margin = has_margin
    for what, length in source.layout.lengths(rendered).items():
      if length > longest.get(what, (-1, 0))[0]:
        longest[what] = length, index
    for name, count in _counts(source, rendered, index).items():
      counts[name] += count
  if not counts["kept"]:
    raise ValueError(source.none_left(len(indices)))
  desirable = counts.pop("desirable")
  return Report(
    kind=source.kind.name,
    records=len(source),
    scanned=len(indices),
    **counts,
    longest={what: length for what, (length, _) in longest.items()},
    longest_at={what: source.where(index) for what, (_, index) in longest.items()},
    desirable=desirable if source.kind.name == "labelled" else None,
    mixed=describe(source.records),
    forms=sorted(known),
  )


def _counts(source: Source, rendered: Any, index: int) -> dict[str, int]:
  """What one record adds to the report."""
  fitted = source.fit(rendered, index)
  if fitted is None:
    return {"dropped": 1}
  if (fault := source.fault(rendered, fitted, index)) is not None:
    return {fault: 1}
  return {
    "kept": 1,
    "truncated": int(fitted is not rendered),
    "tokens": source.layout.tokens(fitted),
    "trained_tokens": sum(int(mask.sum()) for mask in fitted.masks),
    "desirable": int(bool(fitted.extra.get("label", False))),
  }
