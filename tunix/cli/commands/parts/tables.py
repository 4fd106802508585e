"""Tables of text in three formats."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Returns a table in Markdown."""
  lines = [header, ["---"] * len(header), *rows]
  return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plain(rows: Sequence[Sequence[str]]) -> str:
  """Returns aligned columns, two spaces apart, without a header."""
  widths = [max(map(len, column)) for column in zip(*rows)]
  lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths)) for row in rows]
  return "\n".join(line.rstrip() for line in lines)


def as_csv(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Returns a table as comma-separated values."""
  out = io.StringIO()
  csv.writer(out, lineterminator="\n").writerows([header, *rows])
  return out.getvalue()
