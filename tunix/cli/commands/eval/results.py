"""The results of an evaluation, on the terminal and as files."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from tunix.cli.commands.parts import tables
from tunix.report import samples
from tunix.utils import io

PAGE = "samples.html"
_HEADER = ("data", "metric", "value", "standard error")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metric:
  """One number of a result table.

  Attributes:
    name: name with unit.
    value: the number.
    error: standard error over records; None for counts.
  """

  name: str
  value: float
  error: float | None = None

  def cells(self) -> tuple[str, str, str]:
    """Returns name, value and error as text."""
    error = "" if self.error is None else f"{self.error:.4f}"
    return self.name, _number(self.value), error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
  """The results on one file.

  Attributes:
    data: name of the file.
    kind: name of the kind of evaluation.
    metrics: the rows of the table.
    records: one JSON object for each record, in the order of the file.
    groups: the first records, for the page; see `tunix.report.samples`.
    headline: (name, number) above the page.
    notes: sentences about records that were ignored or cut.
  """

  data: str
  kind: str
  metrics: Sequence[Metric]
  records: Sequence[dict[str, Any]]
  groups: Sequence[dict[str, Any]]
  headline: tuple[str, float]
  notes: Sequence[str] = ()


def mean(name: str, values: np.ndarray) -> Metric:
  """Returns the mean over records with its standard error."""
  values = np.asarray(values, np.float64)
  error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else None
  return Metric(name=name, value=float(values.mean()), error=error)


def terminal(sections: Sequence[Section]) -> str:
  """Returns the tables as text for a terminal."""
  parts = []
  for section in sections:
    rows = [
      ("  " + name, value, f"± {error}" if error else "")
      for name, value, error in (metric.cells() for metric in section.metrics)
    ]
    lines = [f"{section.kind}, {section.data}", tables.plain(rows)]
    lines += [f"  note: {note}" for note in section.notes]
    parts.append("\n".join(lines))
  return "\n\n".join(parts)


def write(
  folder: pathlib.Path, sections: Sequence[Section], about: dict[str, Any]
) -> None:
  """Writes `results.json`, `table.md`, `table.csv`, `records.jsonl`, `samples.html`.

  Args:
    folder: is made if it is missing; files of an earlier evaluation are replaced.
    sections: the results.
    about: the version, the arguments, and the digests of the files.

  Raises:
    OSError: the disk is full or not writable.
  """
  rows = [
    (section.data, *metric.cells())
    for section in sections
    for metric in section.metrics
  ]
  results = [
    {
      "data": section.data,
      "kind": section.kind,
      "metrics": {
        m.name: {"value": _finite(m.value), "standard_error": _finite(m.error)}
        for m in section.metrics
      },
      "notes": list(section.notes),
    }
    for section in sections
  ]
  records = [
    json.dumps({"data": section.data, **record}, default=str) + "\n"
    for section in sections
    for record in section.records
  ]
  page = samples.page(
    [
      {
        "title": f"{section.kind} · {section.data} · {section.headline[0]}",
        "batch_reward": _finite(section.headline[1]),
        "groups": list(section.groups),
      }
      for section in sections
    ]
  )
  io.write_json(folder / "results.json", {"about": about, "results": results})
  files = {
    "table.md": tables.markdown(_HEADER, rows) + "\n",
    "table.csv": tables.as_csv(_HEADER, rows),
    "records.jsonl": "".join(records),
    PAGE: page,
  }
  for name, text in files.items():
    io.write_atomic(folder / name, text.encode())


def _finite(value: float | None) -> float | None:
  return None if value is None or not math.isfinite(value) else float(value)


def _number(value: float) -> str:
  return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
