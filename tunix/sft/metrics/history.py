"""The logged metrics of a run as a table."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

# Rows and columns that are displayed; the table keeps all of them.
_ROWS, _COLUMNS = 12, 8


class Column(NamedTuple):
  """The values of one metric.

  Attributes:
    steps: int64 [N], ascending.
    values: float64 [N].
  """

  steps: np.ndarray
  values: np.ndarray


class History(Mapping[str, Column]):
  """A copy of the metrics by event: "train/loss", "eval/loss", "actor/train/kl".

  A notebook displays it as a table with a row for each step.

      steps, losses = trainer.history["train/loss"]
      frame = pandas.DataFrame(trainer.history.rows())

  The table has the steps of this process. A resumed run has earlier steps in
  `metrics.jsonl`.
  """

  def __init__(self, columns: Mapping[str, tuple[ArrayLike, ArrayLike]]):
    self._columns = {
      event: Column(np.array(steps, np.int64), np.array(values, np.float64))
      for event, (steps, values) in columns.items()
    }

  def __getitem__(self, event: str) -> Column:
    """Returns the steps and values of an event.

    Raises:
      KeyError: No value was logged under this name; the message lists all names.
    """
    if event not in self._columns:
      names = ", ".join(self._columns) or "none"
      raise KeyError(f"the metric {event!r} was not logged; expected one of: {names}")
    return self._columns[event]

  def __iter__(self) -> Iterator[str]:
    return iter(self._columns)

  def __len__(self) -> int:
    return len(self._columns)

  def rows(self) -> list[dict[str, Any]]:
    """Returns {"step": 7, "train/loss": 2.5, ...} for each step."""
    by_step: dict[int, dict[str, Any]] = {}
    for event, (steps, values) in self._columns.items():
      for step, value in zip(steps.tolist(), values.tolist()):
        by_step.setdefault(step, {"step": step})[event] = value
    return [by_step[step] for step in sorted(by_step)]

  def __repr__(self) -> str:
    head, *lines = self._cells()
    widths = [max(map(len, column)) for column in zip(head, *lines)]
    text = [
      "  ".join(cell.rjust(width) for cell, width in zip(line, widths))
      for line in (head, *lines)
    ]
    return "\n".join([*text, *self._omitted()])

  def _repr_html_(self) -> str:
    head, *lines = self._cells()

    def row(cells, tag):
      return "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells)

    body = "".join(f"<tr>{row(line, 'td')}</tr>" for line in lines)
    note = html.escape(" ".join(self._omitted()))
    return (
      f"<table><thead><tr>{row(head, 'th')}</tr></thead><tbody>{body}</tbody></table>"
      f"<p>{note}</p>"
    )

  def _cells(self) -> list[list[str]]:
    events = list(self._columns)[:_COLUMNS]
    rows = [row for row in self.rows() if row.keys() & set(events)]
    if len(rows) > _ROWS:
      half = _ROWS // 2
      rows = [*rows[:half], {}, *rows[-half:]]
    lines = [["step", *events]]
    for row in rows:
      values = [f"{row[event]:.5g}" if event in row else "" for event in events]
      lines.append([str(row["step"]), *values] if row else ["..."] * len(lines[0]))
    return lines

  def _omitted(self) -> list[str]:
    events = list(self._columns)[_COLUMNS:]
    return [f"and {', '.join(events)}"] if events else []
