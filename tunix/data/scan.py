"""A pass over the data before training, so that bad input fails in the first minute.

Renders and tokenises record by record and keeps only counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tunix.data.examples import Overlong
from tunix.data.source import ExampleSource
from tunix.generate.tokenizer_adapter import TokenizerAdapter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """Counts over the scanned records.

  Attributes:
    records: records in the data set.
    scanned: records that were looked at.
    kept: examples that training will see.
    dropped: examples left out because they are too long.
    truncated: examples that lost tokens.
    tokens: tokens of the kept examples.
    trained_tokens: those of them that are learned.
    longest: tokens of the longest example before cutting.
    longest_at: its place.
  """

  records: int
  scanned: int
  kept: int
  dropped: int
  truncated: int
  tokens: int
  trained_tokens: int
  longest: int
  longest_at: str

  def __str__(self) -> str:
    part = "" if self.scanned == self.records else f" ({self.scanned:,} looked at)"
    return (
      f"{self.records:,} records{part}: {self.kept:,} kept, {self.dropped:,} dropped, "
      f"{self.truncated:,} truncated; {self.tokens:,} tokens, {self.trained_tokens:,} "
      f"of them trained; the longest has {self.longest:,} ({self.longest_at})"
    )


def scan(
  records: Sequence[Mapping[str, Any]],
  tokenizer: TokenizerAdapter,
  *,
  max_length: int,
  overlong: Overlong = "error",
  chat: bool | None = None,
  template_kwargs: Mapping[str, Any] | None = None,
  limit: int | None = None,
) -> Report:
  """Looks at every record, or at no more than `limit` spread over the data.

  The other arguments are those of `tunix.data.pipeline.build_dataset`.

  Raises:
    ValueError: a record cannot be trained on (its place is named), none of those
      scanned is short enough, or `limit` is not positive.
  """
  if limit is not None and limit < 1:
    raise ValueError(f"limit {limit} must be at least 1, or None for every record")
  source = ExampleSource(
    records=records,
    tokenizer=tokenizer,
    max_length=max_length,
    overlong=overlong,
    chat=chat,
    template_kwargs=template_kwargs,
  )
  stride = 1 if limit is None else -(-len(source) // limit)
  kept = dropped = truncated = tokens = trained = longest = longest_index = 0
  indices = range(0, len(source), stride)
  for index in indices:
    full = source.render(index)
    if len(full) > longest:
      longest, longest_index = len(full), index
    example = source.fit(full, index)
    if example is None:
      dropped += 1
      continue
    kept += 1
    truncated += len(example) < len(full)
    tokens += len(example)
    trained += int(example.mask.sum())
  if not kept:
    raise ValueError(
      f"all {len(indices)} records looked at are longer than {source.max_length} "
      "tokens and were dropped; raise max_length or set overlong to 'truncate'"
    )
  return Report(
    records=len(source),
    scanned=len(indices),
    kept=kept,
    dropped=dropped,
    truncated=truncated,
    tokens=tokens,
    trained_tokens=trained,
    longest=longest,
    longest_at=source.where(longest_index),
  )
