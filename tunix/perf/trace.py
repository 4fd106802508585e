"""Tracers: what a run did, and when, on the host and on the devices of every role.

    tracer = PerfTracer(trace_dir="/tmp/run/logs")
    with tracer.span_group("global_step"):       a phase of the host
      with tracer.span("rollout", "rollout"):    of the host and of a role's devices:
        texts = sample()                         it is over there when it returns
      with tracer.span("train_step", "actor") as span:
        span.device_end(dispatch())              over there when these arrays are ready
    metrics = tracer.export()

Nothing here makes the run wait: a thread of its own waits for the arrays.
"""

from __future__ import annotations

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

# The timeline of devices that nobody has named.
DEVICES = "devices"

# A role ("actor"), a mesh, or some of `jax.devices()`.
Devices = Any


class NoopPhase:
  """A phase that nobody notes."""

  def __enter__(self) -> NoopPhase:
    return self

  def __exit__(self, *error: object) -> None:
    return None

  def device_end(self, waitlist: Any) -> None:
    """Says which arrays the devices compute in this phase."""


_NOTHING = NoopPhase()


class NoopTracer:
  """Notes nothing: no span is made, no clock read, nothing waited for."""

  def span(self, name: str, devices: Devices = None) -> NoopPhase:
    """Around a phase.

    Args:
      name: of it.
      devices: whose timeline it stands in, besides the host's: a role, a mesh, or
        devices. None: the tracer's own, if `device_end` is called; else the host alone.

    Returns: a context manager; its `device_end(arrays)` says when the devices will be
      done. Without that they are done when the phase is.
    """
    del name, devices
    return _NOTHING

  def span_group(self, name: str) -> NoopPhase:
    """Around a phase that holds others, of the host alone."""
    del name
    return _NOTHING

  def on(self, role: str) -> NoopTracer:
    """This tracer for one role: its spans stand in the role's timeline, and it exports
    nothing, for the metrics are the whole run's."""
    del role
    return self

  @property
  def all_devices(self) -> list[str]:
    """The timelines besides the host's."""
    return []

  def synchronize(self) -> None:
    """Waits until every phase is over on its devices; the trace file then has all."""

  def print(self) -> None:
    """Prints the spans since the last export."""

  def export(self) -> Mapping[str, float]:
    """Metrics of the spans that have ended since the last export."""
    return {}


class PerfTracer(NoopTracer):
  """Notes spans.

  Args:
    devices: where phases stand that name none (see `span`); None: "devices".
    export_fn: makes metrics of a PerfSpanQuery; None: seconds by phase and role.
    trace_dir: folder of a trace file for ui.perfetto.dev; None: none is written.
    clock: gives seconds.
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
    self._thread = threading.get_ident()
    self._lock = threading.Lock()  # of all that follows
    # By timeline the spans that are open, outermost first, below one that holds all.
    self._open: dict[str, list[Span]] = {HOST: [Span(HOST, 0.0)]}
    # Since when a timeline of devices has nothing to do, the thread that waits for
    # them, and what it waits for last.
    self._free: dict[str, float] = {}
    self._waiters: dict[str, futures.ThreadPoolExecutor] = {}
    self._last: dict[str, futures.Future[None]] = {}

  def span(self, name: str, devices: Devices = None) -> NoopPhase:
    """See NoopTracer."""
    return _Phase(self, name, None if devices is None else _timeline(devices))

  def span_group(self, name: str) -> NoopPhase:
    """See NoopTracer."""
    return _Phase(self, name, None)

  def on(self, role: str) -> NoopTracer:
    """See NoopTracer."""
    return _RoleTracer(self, role)

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
    """By timeline what has ended, also inside of spans that are open."""
    return {
      id: Span(id, 0.0, inner=[inner for span in stack for inner in span.inner])
      for id, stack in self._open.items()
    }

  # What a phase calls.

  def begin(self, name: str) -> Span:
    """Opens a span of the thread that calls."""
    with self._lock:
      stack = self._open.setdefault(here := self._host(), [Span(here, 0.0)])
      stack.append(span := Span(name, self._clock()))
    return span

  def end(self, span: Span, timeline: str | None, arrays: list[Any]) -> None:
    """Closes it; the devices are done when `arrays` are ready."""
    with self._lock:
      here = self._host()
      self._open[here].pop()
      span.end = self._clock()
      self._note(here, span)
      if timeline is None and arrays:
        timeline = self._default
      if timeline is None:
        return
      if timeline not in self._waiters:
        self._open[timeline] = [Span(timeline, 0.0)]
        self._waiters[timeline] = futures.ThreadPoolExecutor(1, f"trace-{timeline}")
      # Also without arrays: a timeline's spans are noted in the order of their phases.
      self._last[timeline] = self._waiters[timeline].submit(
        self._device_end, span, timeline, arrays
      )

  def _device_end(self, span: Span, timeline: str, arrays: list[Any]) -> None:
    jax.block_until_ready(arrays)
    with self._lock:
      # A device runs what it gets in order: a phase begins there when that before it
      # is over, however early the host sent it.
      begin = max(span.begin, self._free.get(timeline, span.begin))
      end = max(begin, self._clock() if arrays else span.begin + span.duration)
      self._free[timeline] = end
      self._note(timeline, Span(span.name, begin, end, devices=_names(arrays)))

  def _note(self, timeline: str, span: Span) -> None:
    self._open[timeline][-1].inner.append(span)
    if self._writer is not None:
      self._writer.add(timeline, span)

  def _host(self) -> str:
    """The timeline of the thread that calls."""
    if threading.get_ident() == self._thread:
      return HOST
    return f"{HOST}:{threading.current_thread().name}"


class _RoleTracer(NoopTracer):
  """A PerfTracer for one role; see `NoopTracer.on`."""

  def __init__(self, tracer: PerfTracer, role: str):
    self._tracer, self._role = tracer, role

  def span(self, name: str, devices: Devices = None) -> NoopPhase:
    return self._tracer.span(name, self._role if devices is None else devices)

  def span_group(self, name: str) -> NoopPhase:
    return self._tracer.span_group(name)

  def on(self, role: str) -> NoopTracer:
    return self._tracer.on(role)

  @property
  def all_devices(self) -> list[str]:
    return self._tracer.all_devices

  def synchronize(self) -> None:
    self._tracer.synchronize()

  def print(self) -> None:
    self._tracer.print()


class _Phase(NoopPhase):
  """A phase that a PerfTracer notes."""

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

  def device_end(self, waitlist: Any) -> None:
    self._arrays += jax.tree.leaves(waitlist)


def make_tracer(
  options: PerfMetricsOptions | None,
  log_dir: str | os.PathLike[str] | None,
  export_fn: MetricsExportFn | None = None,
) -> NoopTracer:
  """The tracer that settings ask for: None, or disabled, a NoopTracer.

  Args:
    options: the settings.
    log_dir: where the trace goes without `trace_dir`; None: nowhere, with a warning.
    export_fn: instead of the options' own.

  Raises:
    ValueError: two export functions, or one that is not there.
  """
  if options is None or not options.enable_perf_v1:
    return NoopTracer()
  named = options.export_fn()
  if named is not None and export_fn is not None:
    raise ValueError(
      f"custom_export_fn_path {options.custom_export_fn_path!r} and custom_export_fn "
      "are both given: leave one out"
    )
  folder = options.trace_dir or log_dir
  if options.enable_trace_writer and not folder:
    _log.warning(
      "no trace file is written: set trace_dir, or metrics_logging_options with a "
      "log_dir, or enable_trace_writer=False"
    )
  wanted = folder if options.enable_trace_writer else None
  return PerfTracer(export_fn=named or export_fn, trace_dir=wanted or None)


def _scalar(value: Any) -> Any:
  """Of a metric, or of a pair (metric, reducer)."""
  return value[0] if isinstance(value, tuple) else value


def _timeline(devices: Devices) -> str:
  """The name of a role's, a mesh's or some devices' timeline."""
  if isinstance(devices, str):
    return devices
  if isinstance(devices, jax.sharding.Mesh):
    devices = devices.devices.flat
  return ",".join(f"{d.platform}:{d.id}" for d in devices)


def _names(arrays: Sequence[Any]) -> tuple[str, ...]:
  """Of this process's devices that arrays lie on."""
  on = {
    device
    for x in arrays
    if isinstance(x, jax.Array)
    for device in x.sharding.addressable_devices
  }
  return tuple(f"{d.platform}:{d.id}" for d in sorted(on, key=lambda d: d.id))
