"""A pass over preference data before training: counts, and the first record that is
wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

from tunix.data.answer_source import AnswerSource


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerReport:
  """Counts over the scanned records.

  Attributes:
    records: records in the data set.
    scanned: records that were looked at.
    kept: those that training will see.
    dropped: left out because they are too long.
    truncated: kept, but some of their tokens lost.
    empty: left out because a response says nothing.
    equal: left out because chosen and rejected are the same.
    tokens: tokens of the responses that are kept.
    longest_prompt, longest_response: tokens before cutting.
    longest_prompt_at, longest_response_at: their places.
    desirable: kept responses with the label true; None where there are no labels.
    responses: of a record: two, one, or none.
  """

  records: int
  scanned: int
  kept: int
  dropped: int
  truncated: int
  empty: int
  equal: int
  tokens: int
  longest_prompt: int
  longest_prompt_at: str
  longest_response: int
  longest_response_at: str
  desirable: int | None
  responses: int = 2

  def __str__(self) -> str:
    what = ("prompts", "responses", "pairs")[self.responses]
    part = "" if self.scanned == self.records else f" ({self.scanned:,} looked at)"
    counts = {
      "dropped": self.dropped,
      "truncated": self.truncated,
      "with an empty response left out": self.empty,
      "with equal responses left out": self.equal,
    }
    parts = [f"{self.records:,} {what}{part}: {self.kept:,} kept"]
    parts += [f"{n:,} {name}" for name, n in counts.items() if n]
    longest = (
      f"the longest prompt has {self.longest_prompt:,} ({self.longest_prompt_at})"
    )
    if not self.responses:
      return f"{', '.join(parts)}; {longest}"
    text = (
      f"{', '.join(parts)}; {self.tokens:,} tokens of responses; {longest}, the "
      f"longest response {self.longest_response:,} ({self.longest_response_at})"
    )
    if self.desirable is None:
      return text
    return f"{text}; {self.desirable:,} desirable, {self.undesirable:,} undesirable"

  @property
  def undesirable(self) -> int:
    """Kept responses with the label false."""
    return self.kept - (self.desirable or 0)


def scan_answers(source: AnswerSource, limit: int | None = None) -> AnswerReport:
  """Looks at every record, or at no more than `limit` spread over the data.

  Raises:
    ValueError: a record is wrong or cannot be trained on (its place is named), some
      have a margin and others none, none of those scanned is left, or `limit` is not
      positive.
  """
  if limit is not None and limit < 1:
    raise ValueError(f"limit {limit} must be at least 1, or None for every record")
  stride = 1 if limit is None else -(-len(source) // limit)
  indices = range(0, len(source), stride)
  counts: dict[str, int] = dict.fromkeys(
    ("kept", "dropped", "truncated", "empty", "equal", "tokens", "desirable"), 0
  )
  longest: dict[str, tuple[int, int]] = {"prompt": (0, 0), "response": (0, 0)}
  margin = None
  for index in indices:
    rendered = source.render(index)
    has_margin = "margin" in rendered.extra
    if margin not in (None, has_margin):
      raise ValueError(
        f'{source.where(index)}: {"a" if has_margin else "no"} "margin", unlike the '
        "records before: give all of them one, or none"
      )
    margin = has_margin
    full = rendered.answered
    longest["prompt"] = _longer(longest["prompt"], len(full.prompt), index)
    for response in full.responses:
      longest["response"] = _longer(longest["response"], len(response), index)
    _count(source, rendered, index, counts)
  if not counts["kept"]:
    raise ValueError(source.none_left())
  desirable = counts.pop("desirable")
  return AnswerReport(
    records=len(source),
    scanned=len(indices),
    **counts,
    longest_prompt=longest["prompt"][0],
    longest_prompt_at=source.where(longest["prompt"][1]),
    longest_response=longest["response"][0],
    longest_response_at=source.where(longest["response"][1]),
    desirable=desirable if source.kind == "labelled" else None,
    responses=len(source.names),
  )


def _count(
  source: AnswerSource, rendered: Any, index: int, counts: dict[str, int]
) -> None:
  fitted = source.fit(rendered.answered, index)
  if fitted is None:
    counts["dropped"] += 1
    return
  fault = source.fault(rendered, fitted, index)
  if fault is not None:
    counts[fault] += 1
    return
  counts["kept"] += 1
  counts["truncated"] += fitted is not rendered.answered
  counts["tokens"] += sum(len(response) for response in fitted.responses)
  counts["desirable"] += bool(rendered.extra.get("label", False))


def _longer(best: tuple[int, int], length: int, index: int) -> tuple[int, int]:
  return (length, index) if length > best[0] else best
