"""Settings of performance tracing, and the query that selects spans of a run."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from tunix.perf.span import Span

# Timeline of the thread that created the tracer. Other threads have timelines
# "host:<thread name>".
HOST = "host"

# Metrics by name. A value may be a pair (value, reducer); the reducer is ignored.
MetricsT = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class PerfSpanQuery:
  """An immutable selection of spans, narrowed step by step.

  `query().main().last_group("global_step").all_groups("update")` selects all updates of
  the last step. Each method returns a new query.

  Attributes:
    timelines: {timeline: root span that contains its spans}. Timelines are "host" and
      the roles of devices ("actor", "rollout", ...).
    main_thread_id: timeline that `main` selects.
    chosen: spans selected so far.
  """

  timelines: Mapping[str, Span]
  main_thread_id: str = HOST
  chosen: tuple[Span, ...] = ()

  def __call__(self) -> PerfSpanQuery:
    """Returns a query with an empty selection."""
    return dataclasses.replace(self, chosen=())

  def get_main_thread_id(self) -> str:
    """Returns the timeline that `main` selects."""
    return self.main_thread_id

  def get_timeline_ids(self) -> list[str]:
    """Returns the names of all timelines."""
    return list(self.timelines)

  def timeline(self, id: str) -> PerfSpanQuery:
    """Selects the root span of a timeline; nothing if the timeline does not exist."""
    root = self.timelines.get(id)
    return self._at([] if root is None else [root])

  def main(self) -> PerfSpanQuery:
    """Selects the timeline of the main thread."""
    return self.timeline(self.main_thread_id)

  def all_groups(self, name: str) -> PerfSpanQuery:
    """Selects every span called `name` inside the selected spans, at any depth."""
    return self._at([s for span in self.chosen for s in span.find_all(name)])

  def first_group(self, name: str) -> PerfSpanQuery:
    """Selects the first span called `name` inside each selected span."""
    return self.nth_group(name, 0)

  def last_group(self, name: str) -> PerfSpanQuery:
    """Selects the last span called `name` inside each selected span."""
    return self.nth_group(name, -1)

  def nth_group(self, name: str, index: int) -> PerfSpanQuery:
    """Selects the span called `name` at `index` inside each selected span.

    A selected span with too few of them contributes nothing. A negative index counts
    from the end.
    """
    matches = [span.find_all(name) for span in self.chosen]
    return self._at([span for spans in matches for span in spans[index:][:1]])

  def get(self) -> list[Span]:
    """Returns the selected spans."""
    return list(self.chosen)

  def total(self) -> float:
    """Returns the sum of the durations of the selected spans, in seconds."""
    return sum(span.duration for span in self.chosen)

  def _at(self, spans: list[Span]) -> PerfSpanQuery:
    return dataclasses.replace(self, chosen=tuple(spans))


MetricsExportFn = Callable[[PerfSpanQuery], MetricsT]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerfMetricsOptions:
  """Settings of performance tracing.

  Attributes:
    enable_perf_v1: record spans. If False, the tracer is a NoopTracer and all other
      settings are ignored.
    custom_export_fn_path: "module:function" or "module.function", which turns a
      PerfSpanQuery into metrics. Empty: seconds by phase and role
      (`tunix.perf.export.seconds`).
    enable_trace_writer: also write a trace file for ui.perfetto.dev.
    trace_dir: folder of the trace file; empty: the folder of the metrics.
  """

  enable_perf_v1: bool = True
  custom_export_fn_path: str = ""
  enable_trace_writer: bool = True
  trace_dir: str = ""

  def export_fn(self) -> Callable[[PerfSpanQuery], Any] | None:
    """Imports the function of `custom_export_fn_path`; None if the path is empty.

    Raises:
      ValueError: the path names no function.
    """
    path = self.custom_export_fn_path
    if not path:
      return None
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
      function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
      raise ValueError(
        f"custom_export_fn_path is {path!r}: {error}; name a function that can be "
        "imported, as module:function"
      ) from error
    if not callable(function):
      raise ValueError(
        f"custom_export_fn_path is {path!r}, which is {function!r}; expected a function"
      )
    return function


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerfMetricsConfig:
  """Settings of performance tracing that only Python code can give.

  Attributes:
    custom_export_fn: turns a PerfSpanQuery into metrics, as
      `PerfMetricsExport.from_cluster_config(cluster_config)` does.
  """

  custom_export_fn: MetricsExportFn | None = None
