"""The page of one run, or of several runs over each other.

The size of a page is bounded, however long the runs are: see `series` and `samples`.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tunix.report import chart, document, measures, samples, series
from tunix.report.document import Part
from tunix.report.series import Curves

NAME = "report.html"
MOST_RUNS = chart.COLOURS
_MOST_CHARTS = 60
_BUCKETS = 200  # of a curve, shared by the runs
_LONGEST = 300  # characters of a value in a table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """Everything a page shows of a run besides its metrics and samples.

  Attributes:
    name: the run's name on the page.
    folder: the run's folder with `logs/` and `samples/`, or a folder of metrics.
    settings: every key with its value; None: the settings are unknown.
    defaults: the default of every key.
    about: model, data, devices and versions of the run, by name.
    scans: counts of the data by "train" and "eval", as in `scan.json`.
    ended: a phrase about how the run ended; None: the run has not ended.
    failure: the error that ended the newest start; None: there was none.
    notes: sentences about files that cannot be read, and warnings about the run.
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
  """Returns the HTML page of one run, or of several side by side.

  Raises:
    ValueError: no run, or more than `MOST_RUNS`.
  """
  if not 1 <= len(runs) <= MOST_RUNS:
    raise ValueError(
      f"runs are {len(runs)}; expected 1 to {MOST_RUNS} on a page. Make several pages."
    )
  buckets = max(20, _BUCKETS // len(runs) // 2 * 2)
  curves = [series.read(run.folder, buckets=buckets) for run in runs]
  is_comparison = len(runs) > 1
  sections = [_heading(runs, curves), *_charts(runs, curves)]
  sections.append(document.section("Configuration", *_configuration(runs)))
  for run in runs:
    suffix = f" of {run.name}" if is_comparison else ""
    for title, parts in (
      ("Samples", samples.parts(run.folder / "samples")),
      ("Data", _data(run)),
      ("Environment", _environment(run)),
    ):
      sections.append(document.section(title + suffix, *parts))
  title = " and ".join(run.name for run in runs)
  return document.html(title, [section for section in sections if section["parts"]])


def _heading(runs: Sequence[Run], curves: Sequence[Curves]) -> Part:
  parts, is_comparison = [], len(runs) > 1
  for number, (run, read) in enumerate(zip(runs, curves)):
    state = "failed" if run.failure else "not finished"
    state = run.ended or f"{state}; step {read.last_step:,} is the last one logged"
    job = (run.settings or {}).get("job")
    name = f"{run.name}, {job}" if job not in (None, run.name) else run.name
    colour = number if is_comparison else None
    parts.append(document.text(f"{name}: {state}", colour=colour))
    for note in ([run.failure] if run.failure else []) + [*run.notes, *read.notes]:
      parts.append(document.text(note, style="note"))
  legend = (
    "Solid lines are training, dashed lines are evaluation. The horizontal axis is the "
    "step."
  )
  parts.append(document.text(legend, style="soft"))
  return document.section("Comparison of runs" if is_comparison else "Run", *parts)


def _charts(runs: Sequence[Run], curves: Sequence[Curves]) -> list[Part]:
  by_run = {run.name: read for run, read in zip(runs, curves)}
  modes = [item for read in curves for item in read.by_name.items()]
  names = {
    name: None for name, by_mode in modes if any(c.count for c in by_mode.values())
  }
  sections, left = [], _MOST_CHARTS
  for label, charts in measures.without_single_charts(measures.arrange(names)).items():
    shown, left = charts[: max(left, 0)], left - len(charts)
    figures = [chart.data(measure, by_run) for measure in shown]
    parts: list[Part] = []
    if label.startswith("Rewards"):
      parts += [*_decoding(runs), *_reward_names([measure.name for measure in shown])]
    if moving := [data for data in figures if chart.constant(data) is None]:
      parts.append({"kind": "charts", "charts": moving})
    still = [data for data in figures if data not in moving]
    if still:
      values = [f"{data['title']}: {chart.constant(data):,g}" for data in still]
      text = f"The same in every step: {'; '.join(values)}."
      parts.append(document.text(text, style="soft"))
    if figures:
      sections.append(document.section(label, *parts))
  if left < 0:
    note = f"{-left:,} further metrics are only in logs/metrics.jsonl."
    sections[-1]["parts"].append(document.text(note, style="note"))
  return sections


def _reward_names(names: Sequence[str]) -> list[Part]:
  """Explains the charts with "reward" in their names, if there are several."""
  own = [name for name in names if re.search(r"rewards/(?!score/)[^/]*$", name)]
  if not own or "rewards/score/mean" not in "\n".join(names):
    return []
  text = (
    '"reward" is the sum of the reward functions, each with its weight; '
    f"{own[0]} is one of them, without its weight."
  )
  return [document.text(text, style="soft")]


def _decoding(runs: Sequence[Run]) -> list[Part]:
  """Explains why the rewards of training and of evaluations differ."""
  keys = "rollout.temperature", "rollout.eval_temperature"
  for run in runs:
    train, held_out = ((run.settings or {}).get(key) for key in keys)
    if None not in (train, held_out) and held_out != train:
      how = f"at temperature {held_out:g}" if held_out else "greedily"
      note = (
        f"Training samples completions at temperature {train:g} to explore, and "
        f"evaluations decode {how}. Their rewards therefore differ."
      )
      return [document.text(note, style="soft")]
  return []


def _configuration(runs: Sequence[Run]) -> list[Part]:
  columns = [(run.name, run.settings, run.defaults) for run in runs if run.settings]
  is_comparison, parts = len(columns) > 1, []
  if is_comparison:
    keys = dict.fromkeys(key for _, settings, _ in columns for key in settings)
    rows = [(key, *(_cell(s, key) for _, s, _ in columns)) for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    parts.append(document.text("Keys that differ between the runs", style="strong"))
    parts.append(document.table(("key", *(name for name, _, _ in columns)), rows))
  for name, settings, defaults in columns:
    suffix = f" of {name}" if is_comparison else ""
    is_default = {key: settings[key] == defaults.get(key) for key in settings}
    changed = [
      (key, _cell(settings, key), _cell(defaults, key))
      for key in settings
      if not is_default[key]
    ]
    rest = [(key, _cell(settings, key)) for key in settings if is_default[key]]
    title = f"keys that differ from their defaults{suffix}"
    folded = title if is_comparison else ""
    if not is_comparison:
      parts.append(document.text(title.capitalize(), style="strong"))
    parts.append(document.table(("key", "value", "default"), changed, folded=folded))
    other = f"the other keys{suffix}"
    parts.append(document.table(("key", "value"), rest, folded=other))
  return parts


def _data(run: Run) -> list[Part]:
  sources = (run.about.get("data") or {}).items()
  parts = [document.text(f"{name}: {source}") for name, source in sources]
  for name, scan in run.scans.items():
    rows = [
      (key.replace("_", " "), _text(value))
      for key, value in scan["report"].items()
      if value not in (None, [], {}, 0)
    ]
    parts.append(document.table(("", ""), rows, folded=f"counts of the {name} data"))
  return parts


def _environment(run: Run) -> list[Part]:
  rows = [(name, _text(value)) for name, value in run.about.items() if name != "data"]
  return [document.table(("", ""), rows)] if rows else []


def _cell(settings: Mapping[str, Any], key: str) -> str:
  """Returns a value as text; "" if the settings lack the key."""
  return _text(settings[key]) if key in settings else ""


def _text(value: object) -> str:
  if isinstance(value, str):
    text = value
  elif isinstance(value, int) and not isinstance(value, bool):
    text = f"{value:,}"
  else:
    text = json.dumps(value, ensure_ascii=False, default=str)
  return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
