"""The tables of docs/metrics.md; `python -m tests.metrics_table` writes them.

A table is between `<!-- metrics: MODULE.NAME -->` and `<!-- end of metrics -->`, where
NAME is a tuple of `tunix.utils.metric.Metric`. A role may follow: `MODULE.NAME actor/`.
"""

import importlib
import pathlib
import re

from tunix.sft.metrics.jsonl import METRICS_FILE, TIMINGS_FILE, VOLATILE
from tunix.utils.metric import SAME, Metric

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "metrics.md"
PLACE = re.compile(
  r"(<!-- metrics: (tunix\S+)\.(\w+)(?: (\S+))? -->\n)(.*?)(<!-- end of metrics -->\n)",
  re.S,
)
HEAD = (
  "| name | unit | meaning | written | in google-tunix |\n"
  "| --- | --- | --- | --- | --- |\n"
)


def declared(module: str, name: str = "METRICS") -> tuple[Metric, ...]:
  """The metrics that a module declares."""
  return getattr(importlib.import_module(module), name)


def file_of(name: str) -> str:
  """The file that a metric is written to."""
  return METRICS_FILE if VOLATILE.isdisjoint(name.split("/")) else TIMINGS_FILE


def row(metric: Metric, prefix: str) -> str:
  name = f"`{prefix}{metric.name}`"
  written = "; ".join(filter(None, (metric.modes, metric.condition)))
  known = name if metric.known_as == SAME else metric.known_as
  cells = (name, metric.unit, metric.meaning, written, known)
  return f"| {' | '.join(cells)} |\n"


def table(found: re.Match[str]) -> str:
  begin, module, name, prefix, _, end = found.groups()
  rows = [row(metric, prefix or "") for metric in declared(module, name)]
  return begin + "\n" + HEAD + "".join(rows) + "\n" + end


def places() -> list[tuple[str, str, str]]:
  """(module, name of the tuple, prefix) of each table."""
  return [
    (found[2], found[3], found[4] or "") for found in PLACE.finditer(PAGE.read_text())
  ]


def page() -> str:
  """The page with the tables as they should be."""
  return PLACE.sub(table, PAGE.read_text())


if __name__ == "__main__":
  PAGE.write_text(page())
