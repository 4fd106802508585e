"""Widths: row lengths that follow the lengths of the records.

A row that is as wide as the longest record computes nothing for columns that no record
reaches. Widths are multiples of `scan.UNIT` tokens: similar data sets share compiled
programs, and devices multiply matrices of these sizes fast.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tunix.data.rows import OneRow, SideBySide
from tunix.data.scan import UNIT, Report

_MUCH = 1 / 3  # share of padding that is worth a remedy

# Part of a record -> field of a layout that limits it.
_LIMITS = {
  "record": "max_length",
  "prompt": "max_prompt_length",
  "completion": "max_completion_length",
}


def bounded(layout: Any, report: Report, shards: int = 1) -> Any:
  """Returns the layout with rows that are no wider than the longest record.

  Records that fit the limits fit as before.

  Args:
    layout: OneRow or SideBySide with the limits of the settings. They are never
      exceeded, and stay if the scan left records out, which may be longer.
    report: report of a scan with these limits.
    shards: number of shards that the tokens of a row must divide over.
  """
  if report.scanned < report.records:
    return layout
  counts = report.lengths
  unit = math.lcm(UNIT, shards)
  widths = {
    field: min(getattr(layout, field), -(-len(counts[part]) * UNIT // unit) * unit)
    for part, field in _LIMITS.items()
    if part in counts
  }
  # The limit of one part need not divide: only the sum of both does.
  if sum(widths.values()) % shards:
    return layout
  return dataclasses.replace(layout, **widths)


def describe(layout: OneRow | SideBySide, report: Report) -> str:
  """Returns the widths of rows in words, and the share of padding.

  Args:
    layout: layout of the rows, see `bounded`.
    report: report of the records.
  """
  if isinstance(layout, SideBySide):
    parts = layout.max_prompt_length, layout.max_completion_length
    return "{:,} tokens for the prompt and {:,} for a completion".format(*parts)
  width = layout.max_length
  padding = 1 - report.tokens / (report.kept * width)
  text = f"{width:,} tokens, {padding:.0%} of them padding"
  if padding > _MUCH:
    text += "; data.packing=true or data.length_buckets makes it less"
  return text
