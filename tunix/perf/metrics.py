"""What is measured of a run's phases: settings, and questions to the spans."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from tunix.perf.span import Span

# The timeline of the thread that made the tracer; those of others begin with it, too.
HOST = "host"

# Metrics by name. A pair (value, reducer), which some users write, counts as its value.
MetricsT = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class PerfSpanQuery:
  """Asks for spans: `query().main().last_group("global_step").all_groups("update")`.

  Args:
    timelines: a span for each timeline that holds all of it: "host", then what devices
      did, by role ("actor", "rollout", ...).
    main_thread_id: the timeline of `main`.
    chosen: where the next question looks; every question returns a new query.
  """

  timelines: Mapping[str, Span]
  main_thread_id: str = HOST
  chosen: tuple[Span, ...] = ()

  def __call__(self) -> PerfSpanQuery:
    """A query that has not asked anything."""
    return dataclasses.replace(self, chosen=())

  def get_main_thread_id(self) -> str:
    """The timeline of `main`."""
    return self.main_thread_id

  def get_timeline_ids(self) -> list[str]:
    """All timelines."""
    return list(self.timelines)

  def timeline(self, id: str) -> PerfSpanQuery:
    """Goes into a timeline; one in which nothing happened is empty."""
    there = self.timelines.get(id)
    return self._at([] if there is None else [there])

  def main(self) -> PerfSpanQuery:
    """Goes into the host's timeline."""
    return self.timeline(self.main_thread_id)

  def all_groups(self, name: str) -> PerfSpanQuery:
    """Every span of a name, at any depth inside those chosen."""
    return self._at([s for span in self.chosen for s in span.find_all(name)])

  def first_group(self, name: str) -> PerfSpanQuery:
    """Of each span chosen the first inside it of a name."""
    return self.nth_group(name, 0)

  def last_group(self, name: str) -> PerfSpanQuery:
    """Of each span chosen the last inside it of a name."""
    return self.nth_group(name, -1)

  def nth_group(self, name: str, index: int) -> PerfSpanQuery:
    """Of each span chosen the one with this number; those that lack it give none."""
    every = [span.find_all(name) for span in self.chosen]
    return self._at([s for found in every for s in found[index:][:1]])

  def get(self) -> list[Span]:
    """The spans chosen."""
    return list(self.chosen)

  def total(self) -> float:
    """Seconds of the spans chosen together."""
    return sum(span.duration for span in self.chosen)

  def _at(self, spans: list[Span]) -> PerfSpanQuery:
    return dataclasses.replace(self, chosen=tuple(spans))


MetricsExportFn = Callable[[PerfSpanQuery], MetricsT]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerfMetricsOptions:
  """Whether a run notes what it did when, and where that goes.

  Attributes:
    enable_perf_v1: note it; false: a NoopTracer, whatever else is set.
    custom_export_fn_path: "module:function" or "module.function" that makes metrics of
      a PerfSpanQuery; empty: seconds by phase and role (tunix.perf.export.seconds).
    enable_trace_writer: write a trace file for ui.perfetto.dev as well.
    trace_dir: its folder; empty: the folder of the metrics.
  """

  enable_perf_v1: bool = True
  custom_export_fn_path: str = ""
  enable_trace_writer: bool = True
  trace_dir: str = ""

  def export_fn(self) -> Callable[[PerfSpanQuery], Any] | None:
    """The function of `custom_export_fn_path`; None without one.

    Raises:
      ValueError: there is none of this name.
    """
    path = self.custom_export_fn_path
    if not path:
      return None
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
      found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
      raise ValueError(
        f"custom_export_fn_path is {path!r}: {error}; name a function that can be "
        "imported, as module:function"
      ) from error
    if not callable(found):
      raise ValueError(f"custom_export_fn_path {path!r} is no function: {found!r}")
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerfMetricsConfig:
  """What Python alone can say of it.

  Attributes:
    custom_export_fn: makes metrics of a PerfSpanQuery, such as
      `PerfMetricsExport.from_cluster_config(cluster_config)`.
  """

  custom_export_fn: MetricsExportFn | None = None
