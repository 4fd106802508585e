"""Tracers, which record the phases of a run on the host and on the devices of roles.

    tracer = PerfTracer(trace_dir="/tmp/run/logs")
    with tracer.span_group("global_step"):     # a phase of the host
      with tracer.span("rollout", "rollout"):  # host and devices of the role "rollout";
        texts = sample()                       # both end when the block ends
      with tracer.span("train_step", "actor") as span:
        span.device_end(dispatch())            # devices end when the arrays are ready
    metrics = tracer.export()

A tracer never makes the run wait: separate threads wait for the arrays.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any

import jax

from tunix.perf import export as export_lib
from tunix.perf.metrics import (
  HOST,
  MetricsExportFn,
  PerfMetricsOptions,
  PerfSpanQuery,
)
from tunix.perf.perfetto import PerfettoTraceWriter
from tunix.perf.span import Span

_log = logging.getLogger(__name__)

# Timeline of spans with arrays but without named devices.
DEVICES = "devices"

# A role ("actor"), a mesh, or a sequence of `jax.Device`s.
Devices = Any


class NoopPhase:
  """A phase that is not recorded."""

  def __enter__(self) -> NoopPhase:
    return self

  def __exit__(self, *error: object) -> None:
    return None

  def device_end(self, waitlist: object) -> None:
    """Names the arrays that the devices compute in this phase."""


_NOTHING = NoopPhase()


class NoopTracer:
  """A tracer that records nothing, reads no clock and waits for nothing."""

  def span(self, name: str, devices: Devices = None) -> NoopPhase:
    """Returns a context manager that records a phase.

    Args:
      name: name of the phase.
      devices: role, mesh or devices whose timeline also gets the phase; the timeline of
        the host always does. None: the tracer's default timeline if `device_end` is
        called, otherwise only the host's.

    Returns: a context manager. Call its `device_end(arrays)` with the results of the
      phase: the devices end when these arrays are ready. Without a call the devices end
      together with the block.
    """
    del name, devices
    return _NOTHING

  def span_group(self, name: str) -> NoopPhase:
    """Returns a context manager that records a phase around others, on the host."""
    del name
    return _NOTHING

  def on(self, role: str) -> NoopTracer:
    """Returns a view of this tracer whose spans go to the timeline of `role`.

    The view exports nothing: metrics are those of the whole run.
    """
    del role
    return self

  @property
  def all_devices(self) -> list[str]:
    """Names of the timelines of devices."""
    return []

  def synchronize(self) -> None:
    """Waits until all phases have ended on their devices, and writes the trace file."""

  def print(self) -> None:
    """Prints the spans that ended since the last export."""

  def export(self) -> Mapping[str, float]:
    """Returns metrics of the spans that ended since the last export."""
    return {}


class PerfTracer(NoopTracer):
  """A tracer that records spans.

  Args:
    devices: default timeline of spans that name no devices (see `span`); None:
      "devices".
    export_fn: function that turns a PerfSpanQuery into metrics; None: seconds by phase
      and role.
    trace_dir: folder of a trace file for ui.perfetto.dev; None: no file.
    clock: function that returns the time in seconds.
  """

  def __init__(
    self,
    devices: Devices = None,
    export_fn: MetricsExportFn | None = None,
    *,
    trace_dir: str | os.PathLike[str] | None = None,
    clock: Callable[[], float] = time.perf_counter,
  ):
    self._default = DEVICES if devices is None else _timeline(devices)
    self._export_fn = export_fn or export_lib.seconds
    self._clock = clock
    self._writer: PerfettoTraceWriter | None = None
    if trace_dir is not None:
      epoch = time.time() - clock()
      self._writer = PerfettoTraceWriter(trace_dir, jax.process_index(), epoch)
    self._role: str | None = None  # of a view; see `on`
    self._thread = threading.get_ident()
    self._lock = threading.Lock()  # guards everything below
    # {timeline: open spans, outermost first}. The first one is the root of the timeline
    # and never ends.
    self._open: dict[str, list[Span]] = {HOST: [Span(HOST, 0.0)]}
    # For each timeline of devices: the time at which they became idle, the thread that
    # waits for their arrays, and the last wait it was given.
    self._free: dict[str, float] = {}
    self._waiters: dict[str, futures.ThreadPoolExecutor] = {}
    self._last: dict[str, futures.Future[None]] = {}

  def span(self, name: str, devices: Devices = None) -> NoopPhase:
    """See NoopTracer."""
    devices = self._role if devices is None else devices
    return _Phase(self, name, None if devices is None else _timeline(devices))

  def span_group(self, name: str) -> NoopPhase:
    """See NoopTracer."""
    return _Phase(self, name, None)

  def on(self, role: str) -> NoopTracer:
    """See NoopTracer."""
    view = copy.copy(self)  # it shares the spans, the lock and the threads
    view._role = role
    return view

  @property
  def all_devices(self) -> list[str]:
    """See NoopTracer."""
    return [id for id in self._open if not id.startswith(HOST)]

  def synchronize(self) -> None:
    """See NoopTracer.

    Raises:
      OSError: the trace file cannot be written.
    """
    # A computation that failed is the trainer's to report: `wait` raises nothing.
    futures.wait(list(self._last.values()))
    with self._lock:
      if self._writer is not None:
        self._writer.flush()

  def print(self) -> None:
    """See NoopTracer."""
    with self._lock:
      for timeline in self._ended().values():
        print(timeline)

  def export(self) -> Mapping[str, float]:
    """See NoopTracer.

    Raises:
      OSError: the trace file cannot be written.
    """
    if self._role is not None:
      return {}
    with self._lock:
      ended = self._ended()
      for stack in self._open.values():
        for span in stack:
          span.inner = []
      if self._writer is not None:
        self._writer.flush()
    metrics = self._export_fn(PerfSpanQuery(ended))
    return {name: _scalar(value) for name, value in metrics.items()}

  def _ended(self) -> dict[str, Span]:
    """Returns {timeline: root of ended spans}, also those inside of open spans."""
    return {
      id: Span(id, 0.0, inner=[inner for span in stack for inner in span.inner])
      for id, stack in self._open.items()
    }

  # What a phase calls.

  def begin(self, name: str) -> Span:
    """Opens a span on the timeline of the calling thread."""
    with self._lock:
      host = self._host()
      stack = self._open.setdefault(host, [Span(host, 0.0)])
      stack.append(span := Span(name, self._clock()))
    return span

  def end(self, span: Span, timeline: str | None, arrays: list[Any]) -> None:
    """Closes a span; the devices end when `arrays` are ready."""
    with self._lock:
      host = self._host()
      self._open[host].pop()
      span.end = self._clock()
      self._add(host, span)
      if timeline is None and arrays:
        timeline = self._default
      if timeline is None:
        return
      if timeline not in self._waiters:
        self._open[timeline] = [Span(timeline, 0.0)]
        self._waiters[timeline] = futures.ThreadPoolExecutor(1, f"trace-{timeline}")
      # Spans without arrays take the same path, so that a timeline keeps their order.
      self._last[timeline] = self._waiters[timeline].submit(
        self._device_end, span, timeline, arrays
      )

  def _device_end(self, span: Span, timeline: str, arrays: list[Any]) -> None:
    jax.block_until_ready(arrays)
    with self._lock:
      # A device runs its work in order. A phase begins there when the phase before it
      # has ended, however early the host dispatched it.
      begin = max(span.begin, self._free.get(timeline, span.begin))
      end = max(begin, self._clock() if arrays else span.begin + span.duration)
      self._free[timeline] = end
      self._add(timeline, Span(span.name, begin, end, devices=_names(arrays)))

  def _add(self, timeline: str, span: Span) -> None:
    self._open[timeline][-1].inner.append(span)
    if self._writer is not None:
      self._writer.add(timeline, span)

  def _host(self) -> str:
    """Returns the timeline of the calling thread."""
    if threading.get_ident() == self._thread:
      return HOST
    return f"{HOST}:{threading.current_thread().name}"


class _Phase(NoopPhase):
  """A phase that a PerfTracer records."""

  def __init__(self, tracer: PerfTracer, name: str, timeline: str | None):
    self._tracer, self._name, self._timeline = tracer, name, timeline
    self._arrays: list[Any] = []
    self._span: Span | None = None

  def __enter__(self) -> NoopPhase:
    self._span = self._tracer.begin(self._name)
    return self

  def __exit__(self, *error: object) -> None:
    assert self._span is not None
    self._tracer.end(self._span, self._timeline, self._arrays)

  def device_end(self, waitlist: object) -> None:
    self._arrays += jax.tree.leaves(waitlist)


def make_tracer(
  options: PerfMetricsOptions | None,
  log_dir: str | os.PathLike[str] | None,
  export_fn: MetricsExportFn | None = None,
) -> NoopTracer:
  """Returns the tracer for some settings.

  Args:
    options: the settings; None, or disabled: the result is a NoopTracer.
    log_dir: folder of the trace file if `options.trace_dir` is empty. If both are
      missing, no file is written, and a warning says so.
    export_fn: export function, in place of `options.custom_export_fn_path`.

  Raises:
    ValueError: two export functions are given, or one that cannot be imported.
  """
  if options is None or not options.enable_perf_v1:
    return NoopTracer()
  named = options.export_fn()
  if named is not None and export_fn is not None:
    raise ValueError(
      f"custom_export_fn_path is {options.custom_export_fn_path!r} and "
      "custom_export_fn is given, too: leave one out"
    )
  folder = options.trace_dir or log_dir
  if options.enable_trace_writer and not folder:
    _log.warning(
      "no trace file is written: set trace_dir, or metrics_logging_options with a "
      "log_dir, or enable_trace_writer=False"
    )
  trace_dir = folder if options.enable_trace_writer else None
  return PerfTracer(export_fn=named or export_fn, trace_dir=trace_dir or None)


def _scalar(value: object) -> Any:
  """Returns a metric, or the metric of a pair (metric, reducer)."""
  return value[0] if isinstance(value, tuple) else value


def _timeline(devices: Devices) -> str:
  """Returns the name of the timeline of a role, a mesh, or devices."""
  if isinstance(devices, str):
    return devices
  if isinstance(devices, jax.sharding.Mesh):
    devices = devices.devices.flat
  return ",".join(f"{d.platform}:{d.id}" for d in devices)


def _names(arrays: Sequence[Any]) -> tuple[str, ...]:
  """Returns the names of this process's devices that hold the arrays."""
  on = {
    device
    for x in arrays
    if isinstance(x, jax.Array)
    for device in x.sharding.addressable_devices
  }
  return tuple(f"{d.platform}:{d.id}" for d in sorted(on, key=lambda d: d.id))
