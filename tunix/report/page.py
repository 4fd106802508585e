"""Runs as one page of HTML that needs nothing besides itself: no network, no library.

What it holds is bounded, however long the runs are: see `series` and `samples`.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import pathlib
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from tunix.report import chart, measures, samples, series
from tunix.report.series import Curves

NAME = "report.html"
MOST_RUNS = 8  # as many as there are colours
_MOST_CHARTS = 60
_BUCKETS = 200  # of a curve, shared by the runs
_LONGEST = 300  # characters of a value in a table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """What a page is told of a run besides its metrics.

  Attributes:
    name: on the page.
    folder: of the run, with `logs/` and `samples/`; or of metrics alone.
    settings: every key with its value; None: not known.
    defaults: of those keys.
    about: what the run was on, by name: model, data, devices, versions.
    scans: counts of the data by "train" and "eval", as `scan.json` has them.
    ended: how it ended, in words; None: it has not.
    failure: what made its newest start fail, in the error's words; None: nothing did.
    notes: what could not be read, in words.
  """

  name: str
  folder: pathlib.Path
  settings: Mapping[str, Any] | None = None
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  scans: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  ended: str | None = None
  failure: str | None = None
  notes: Sequence[str] = ()


def render(runs: Sequence[Run]) -> str:
  """The page of one run, or of several side by side.

  Raises:
    ValueError: no run, or more than `MOST_RUNS`.
  """
  if not 1 <= len(runs) <= MOST_RUNS:
    raise ValueError(
      f"{len(runs)} runs were named: a page takes 1 to {MOST_RUNS}; make several pages"
    )
  most = max(20, _BUCKETS // len(runs) // 2 * 2)
  curves = [series.read(run.folder, most=most) for run in runs]
  title = " and ".join(run.name for run in runs)
  parts = [_heading(runs, curves)]
  parts += _charts(runs, curves)
  parts += [_section("Configuration", _configuration(runs))]
  for run in runs:
    behind = f" of {escape(run.name)}" if len(runs) > 1 else ""
    parts += [_section(f"Samples{behind}", samples.section(run.folder / "samples"))]
    parts += [_section(f"Data{behind}", _data(run))]
    parts += [_section(f"Environment{behind}", _environment(run))]
  template = importlib.resources.files("tunix.report").joinpath("page.html").read_text()
  # The title last: no text of a run is looked through for places.
  before, after = template.split("<!--BODY-->")
  before = before.replace("<!--TITLE-->", escape(title))
  return before + "".join(parts) + after


def _heading(runs: Sequence[Run], curves: Sequence[Curves]) -> str:
  legend, several = [], len(runs) > 1
  for number, (run, read) in enumerate(zip(runs, curves)):
    last = f"step {read.last_step:,} is the last one logged"
    state = run.ended or f"{'failed' if run.failure else 'not finished'}; {last}"
    key = f'<span class="key k{number}"></span>' if several else ""
    notes = "".join(
      f'<p class="note">{escape(note)}</p>' for note in (*run.notes, *read.notes)
    )
    if run.failure:
      notes = f'<pre class="note">{escape(run.failure)}</pre>{notes}'
    job = (run.settings or {}).get("job")
    name = f"<b>{escape(run.name)}</b>" + (f", {escape(str(job))}" if job else "")
    legend.append(f"<p>{key}{name}: {escape(state)}</p>{notes}")
  title = "Comparison of runs" if several else "Run"
  kinds = "training is a line, evaluation is dashed"
  return (
    f'<header><h1>{title}</h1>{"".join(legend)}<p class="soft">In the curves {kinds}; '
    "the horizontal axis is the step.</p></header>"
  )


def _charts(runs: Sequence[Run], curves: Sequence[Curves]) -> list[str]:
  by_run = {run.name: read for run, read in zip(runs, curves)}
  names = [
    name
    for name in dict.fromkeys(n for read in curves for n in read.by_name)
    if any(c.count for read in curves for c in read.by_name.get(name, {}).values())
  ]
  sections, number = [], 0
  for label, charts in measures.arrange(names).items():
    figures = []
    for measure in charts:
      number += 1
      if number <= _MOST_CHARTS:
        figures.append(chart.figure(measure, chart.lines_of(measure, by_run), number))
    if figures:
      sections.append(_section(label, f'<div class="charts">{"".join(figures)}</div>'))
  if number > _MOST_CHARTS:
    left = f"{number - _MOST_CHARTS:,} further metrics are in logs/metrics.jsonl alone."
    sections.append(f'<p class="note">{left}</p>')
  return sections


def _configuration(runs: Sequence[Run]) -> str:
  known = [run for run in runs if run.settings is not None]
  if not known:
    return ""
  parts = []
  if len(known) > 1:
    parts.append("<h3>What differs between the runs</h3>")
    keys = dict.fromkeys(key for run in known for key in run.settings or {})
    rows = [(key, *(_of(run, key) for run in known)) for key in keys]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    parts.append(_table(("key", *(run.name for run in known)), differing))
  for run in known:
    settings = run.settings or {}
    changed = [k for k in settings if settings[k] != run.defaults.get(k)]
    rows = [(key, _of(run, key), _told(run.defaults.get(key))) for key in changed]
    rest = [(key, _of(run, key)) for key in settings if key not in changed]
    name = f" of {escape(run.name)}" if len(known) > 1 else ""
    table = _table(("key", "value", "default"), rows)
    if len(known) == 1:
      parts.append(f"<h3>What differs from the defaults</h3>{table}")
    else:
      parts.append(_folded(f"what differs from the defaults{name}", table))
    parts.append(_folded(f"the other keys{name}", _table(("key", "value"), rest)))
  return "".join(parts)


def _data(run: Run) -> str:
  parts = [
    f"<p><b>{escape(str(name))}</b>: {escape(str(text))}</p>"
    for name, text in (run.about.get("data") or {}).items()
  ]
  for name, scan in run.scans.items():
    rows = [
      (key.replace("_", " "), _told(value))
      for key, value in scan["report"].items()
      if value not in (None, [], {}, 0)
    ]
    parts.append(_folded(f"counts of the {escape(name)} data", _table(("", ""), rows)))
  return "".join(parts)


def _environment(run: Run) -> str:
  rows = [(k, _told(v)) for k, v in run.about.items() if k != "data"]
  return _table(("", ""), rows) if rows else ""


def _section(title: str, body: str) -> str:
  return f"<section><h2>{title}</h2>{body}</section>" if body else ""


def _folded(summary: str, body: str) -> str:
  return f"<details><summary>{summary}</summary>{body}</details>" if body else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Texts, escaped here; the first of a row names it."""
  if not rows:
    return '<p class="soft">nothing</p>'
  top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
  top = f"<thead><tr>{top}</tr></thead>" if any(head) else ""
  body = "".join(
    f'<tr><th scope="row">{escape(name)}</th>'
    + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    + "</tr>"
    for name, *cells in rows
  )
  return f'<div class="wide"><table>{top}<tbody>{body}</tbody></table></div>'


def _of(run: Run, key: str) -> str:
  """A value of a run's settings; "" where it has no such key."""
  settings = run.settings or {}
  return _told(settings[key]) if key in settings else ""


def _told(value: Any) -> str:
  if isinstance(value, str):
    text = value
  elif isinstance(value, int) and not isinstance(value, bool):
    text = f"{value:,}"
  else:
    text = json.dumps(value, ensure_ascii=False, default=str)
  return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
