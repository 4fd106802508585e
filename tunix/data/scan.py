"""A scan of the data before training, so that bad input fails in the first minute.

A scan renders and tokenizes one record at a time and keeps counts only.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from tunix.data import forms
from tunix.data.chat import Rendered
from tunix.data.reading.mixture import describe
from tunix.data.reading.stream import Streamed
from tunix.data.records import (
  IMAGE_TOKENS_COLUMN,
  IMAGES_COLUMN,
  KINDS,
  PAIRS,
  PROMPT_COLUMN,
  PROMPT_IDS_COLUMN,
  PROMPT_ROWS,
  SFT,
  check_same_extra,
  is_empty,
)
from tunix.data.rows import IMAGE_TOKENS
from tunix.data.source import Source
from tunix.utils import checks, terminal

UNIT = 64  # tokens of which widths are multiples
FINE_UNIT = 16  # the same, for a largest width from `UNIT` to `FINE_MOST` tokens
FINE_MOST = 512
SCANNED = 1024  # records of a stream that a scan without a limit reads
STEP = 8  # tokens of a step of `Report.lengths`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """Counts over the scanned records.

  Runs save it as JSON, so that a resumed run need not scan again.

  Attributes:
    kind: name of the kind that the records were read as.
    records: number of records in the data set; None for a stream.
    scanned: number of records that were scanned.
    kept: number of scanned records that training will use.
    dropped: number of records left out because they are too long.
    truncated: number of kept records that lost tokens.
    empty: number of records left out because a completion is empty.
    equal: number of records left out because chosen and rejected are equal.
    tokens: tokens of the kept records; only completions count in pairs and labeled
      completions.
    trained_tokens: tokens among them that are trained or scored.
    longest: largest number of tokens before cutting, by limited part ("record", or
      "prompt" and "completion"), and of image tokens if records have images.
    longest_at: places of the longest records, by part.
    desirable: number of kept completions with the label true; None without labels.
    mixed: one line for each part of a weighted mixture.
    forms: names of other libraries whose forms the records have.
    blank: number of fine-tuning records with an empty answer, which are kept.
    stripped: number of kept records from which reasoning was removed.
    unknown: number of tokens of the kept records, with their prompts, that stand for
      text outside the tokenizer's vocabulary.
    lengths: by limited part, how many kept records have at most 8 tokens after
      cutting, how many 9 to 16, and so on in steps of `STEP`. Pairs have the part
      "sequence" too: a prompt with one of its completions.
  """

  kind: str
  records: int | None
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
  blank: int = 0
  stripped: int = 0
  unknown: int = 0
  lengths: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)

  @property
  def is_whole(self) -> bool:
    """True if all records were scanned."""
    return self.scanned == self.records

  @property
  def longest_prompt(self) -> int:
    """Tokens of the longest prompt; 0 for records in one row."""
    return self.longest.get("prompt", 0)

  @property
  def undesirable(self) -> int:
    """Number of kept completions with the label false."""
    return self.kept - (self.desirable or 0)

  @property
  def image_tokens(self) -> int | None:
    """Largest number of image tokens of a record; 0: no scanned record has images.

    None: some have images, and a record that was not scanned may have more.
    """
    found = self.longest.get(IMAGE_TOKENS, 0)
    return found if self.is_whole or not found else None

  def __str__(self) -> str:
    kind = KINDS[self.kind]
    part = "" if self.is_whole else f" ({self.scanned:,} looked at)"
    counts = {
      "dropped": self.dropped,
      "truncated": self.truncated,
      "with an empty completion left out": self.empty,
      "with equal completions left out": self.equal,
      "without their reasoning": self.stripped,
    }
    always = ("dropped", "truncated") if kind.name == "sft" else ()
    streamed = f"a stream of {kind.noun}"
    total = streamed if self.records is None else kind.counted(self.records)
    parts = [f"{total}{part}: {self.kept:,} kept"]
    parts += [f"{n:,} {name}" for name, n in counts.items() if n or name in always]
    if self.forms:
      parts.append(f"read as {' and '.join(self.forms)} have them")
    text = ", ".join(parts)
    if kind.name == "sft":
      tokens = terminal.counted(self.tokens, "token")
      text += f"; {tokens}, {self.trained_tokens:,} of them trained"
    elif kind.completions:
      text += f"; {terminal.counted(self.tokens, 'token')} of completions"
    one_row = {"record": "the longest", IMAGE_TOKENS: "the most images"}
    text += "; " + ", ".join(
      one_row.get(what, f"the longest {what}")
      + f" {'have' if what == IMAGE_TOKENS else 'has'} {self.longest[what]:,}"
      + f" ({self.longest_at[what]})"
      for what in self.longest
    )
    if self.desirable is not None:
      text += f"; {self.desirable:,} desirable, {self.undesirable:,} undesirable"
    return "; ".join([text, *self.mixed])


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptReport(Report):
  """Counts over prompts with columns.

  Attributes:
    columns: names of the columns without the prompt, the same in every record.
  """

  columns: Sequence[str] = ()

  def __str__(self) -> str:
    columns = [f"columns {', '.join(self.columns)}"] if self.columns else []
    return "; ".join([super().__str__(), *columns])


def scan(
  source: Source, limit: int | None = None, *, kept: dict[int, Any] | None = None
) -> Report:
  """Scans all records, or at most `limit` records spread over the data.

  Of a stream it scans the first `limit` records, 1024 without a limit.

  Args:
    source: records and their settings.
    limit: largest number of records to scan; None for all.
    kept: receives {record number: element} of every record that training will use.

  Returns:
    The counts; a PromptReport for the kind PROMPT_ROWS.

  Raises:
    ValueError: a record is invalid or cannot be trained on (the message names its
      place), the records differ in their further fields, all scanned records are
      dropped, or `limit` is not positive.
  """
  checks.number("limit", limit, checks.COUNT, whole=True, optional=True)
  if isinstance(source.records, Streamed):
    head = source.records.head(limit or SCANNED)
    report = scan(dataclasses.replace(source, records=head), kept=kept)
    return dataclasses.replace(report, records=None)
  stride = 1 if limit is None else -(-len(source) // limit)
  indices = range(0, len(source), stride)
  names = ("kept", "dropped", "truncated", "empty", "equal", "tokens", "trained_tokens")
  names += ("desirable", "blank", "stripped", "unknown")
  counts: dict[str, int] = dict.fromkeys(names, 0)
  longest: dict[str, tuple[int, int]] = {}
  lengths: dict[str, Counter[int]] = defaultdict(Counter)  # {part: {tokens: records}}
  extra, libraries = None, set()
  for index in indices:
    libraries |= _library(source, index)
    rendered = source.render(index)
    extra = rendered.extra if extra is None else extra
    check_same_extra(rendered.extra, extra, source.where(index))
    for what, length in source.layout.lengths(rendered).items():
      if length > longest.get(what, (-1, 0))[0]:
        longest[what] = length, index
    fitted = source.fit(rendered, index)
    for name, count in _counts(source, rendered, fitted, index).items():
      counts[name] += count
      if name == "kept" and fitted is not None:
        for what, length in source.layout.lengths(fitted).items():
          lengths[what][length] += 1
        if source.kind is PAIRS:
          for completion in fitted.completions:
            lengths["sequence"][len(fitted.prompt) + len(completion)] += 1
        if kept is not None:
          kept[index] = source.layout.element(fitted)
  if not counts["kept"]:
    raise ValueError(source.none_left(len(indices)))
  desirable = counts.pop("desirable")
  fields: dict[str, Any] = dict(
    kind=source.kind.name,
    records=len(source),
    scanned=len(indices),
    **counts,
    longest={what: length for what, (length, _) in longest.items()},
    longest_at={what: source.where(index) for what, (_, index) in longest.items()},
    desirable=desirable if source.kind.name == "labelled" else None,
    mixed=describe(source.records),
    forms=sorted(libraries),
    lengths={what: _histogram(tokens) for what, tokens in lengths.items()},
  )
  if source.kind is not PROMPT_ROWS:
    return Report(**fields)
  ours = {PROMPT_COLUMN, PROMPT_IDS_COLUMN, IMAGE_TOKENS_COLUMN}
  if source.images is not None and IMAGE_TOKENS not in longest:
    ours.add(IMAGES_COLUMN)  # no prompt has an image
  columns = tuple(name for name in extra or () if name not in ours)
  return PromptReport(**fields, columns=columns)


def _library(source: Source, index: int) -> set[str]:
  """Returns the name of the library whose form a record has, if any."""
  if not source.kind.forms:
    return set()
  form = forms.find(source.records[index], *source.kind.forms)
  return set() if form is None else {form.name}


def _counts(
  source: Source, rendered: Rendered, fitted: Rendered | None, index: int
) -> dict[str, int]:
  """Returns the counts that one record adds to the report."""
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
    "blank": int(source.kind is SFT and _is_blank(source, index)),
    "stripped": int(rendered.is_stripped),
    "unknown": _unknown(source, fitted),
  }


def _unknown(source: Source, fitted: Rendered) -> int:
  """Returns the number of tokens for text outside the tokenizer's vocabulary."""
  if (unknown := source.tokenizer.unk_id()) is None:
    return 0
  return sum(
    int((ids == unknown).sum()) for ids in (fitted.prompt, *fitted.completions)
  )


def _histogram(lengths: Mapping[int, int]) -> list[int]:
  """Returns the counts of `Report.lengths` from {tokens: records}."""
  counts = [0] * max(1, -(-max(lengths) // STEP))
  for length, records in lengths.items():
    counts[max(0, length - 1) // STEP] += records
  return counts


def _is_blank(source: Source, index: int) -> bool:
  """Returns True if an answer of a fine-tuning record is empty."""
  record = source.kind.read(source.records[index], source.where(index))
  completion = record.completions["completion"]
  if isinstance(completion, str):
    return is_empty(completion)
  return any(is_empty([turn]) for turn in completion if turn["role"] == "assistant")
