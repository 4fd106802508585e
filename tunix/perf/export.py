"""Functions that turn the spans of a step into metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tunix.perf.metrics import HOST, MetricsExportFn, PerfSpanQuery
from tunix.perf.span import Span, busy_seconds
from tunix.utils.metric import SAME, Metric

METRICS = (
  Metric(
    "perf/<phase>_sec",
    "s",
    "time of the host in a phase: global_step, data, prepare, train_step, device_wait, "
    "evaluation, checkpoint, rollout, refer_inference, old_logps, values, ...",
    "train",
    "with `perf_metrics_options`",
  ),
  Metric(
    "perf/busy/<role>_sec",
    "s",
    "time in which the devices of a role worked",
    "train",
    "with `perf_metrics_options`",
  ),
)
_CLUSTER = "with `PerfMetricsExport.from_cluster_config`"
STEP_METRICS = (
  Metric(
    "perf/global_step_time", "s", "duration of the steps", "train", _CLUSTER, SAME
  ),
  Metric(
    "perf/weight_sync_time",
    "s",
    "transfer of the weights to the rollout",
    "train",
    _CLUSTER,
    SAME,
  ),
  Metric(
    "perf/rollout_idle_time",
    "s",
    "time in which the devices of the rollout work for no role",
    "train",
    _CLUSTER,
    SAME,
  ),
  Metric(
    "perf/sum/<phase>_time",
    "s",
    "duration of a phase, summed over its runs in a step",
    "train",
    _CLUSTER,
    SAME,
  ),
  Metric(
    "perf/mean/<phase>_time",
    "s",
    "mean duration of a run of the phase",
    "train",
    _CLUSTER,
    SAME,
  ),
)

EVALUATION = "evaluation"
STEP = "global_step"

# {public metric name: (timeline, span name)}. None stands for the host's timeline.
_PHASES: dict[str, tuple[str | None, str]] = {
  "rollout": (None, "rollout"),
  "refer_inference": (None, "refer_inference"),
  "actor_train": (None, "actor_train"),
  "actor_train_step": ("actor", "train_step"),
  "critic_train": (None, "critic_train"),
  "critic_train_step": ("critic", "train_step"),
}


def seconds(query: PerfSpanQuery) -> dict[str, float]:
  """Returns the seconds of each phase on the host and of each role on its devices.

  `perf/<phase>_sec` is the host's time in a phase. `perf/busy/<role>_sec` is the time
  in which the devices of a role were at work. A nested phase counts in its own metric
  and in that of the phase around it. Phases inside an evaluation count only as
  evaluation, so that its rollouts are not added to the rollouts of the step.
  """
  out: dict[str, float] = {}
  for id, root in query.timelines.items():
    if not id.startswith(HOST):
      out[f"perf/busy/{id}_sec"] = busy_seconds(root.inner)
      continue
    for span in _of_training(root):
      name = f"perf/{span.name}_sec"
      out[name] = out.get(name, 0.0) + span.duration
  return out


def _of_training(root: Span) -> list[Span]:
  out = []
  for span in root.inner:
    out.append(span)
    if span.name != EVALUATION:
      out += _of_training(span)
  return out


class PerfMetricsExport:
  """Factory of the metrics function for reinforcement learning."""

  @staticmethod
  def from_cluster_config(cluster_config: Any) -> MetricsExportFn:
    """Returns `step_metrics` for the meshes of a cluster.

    Args:
      cluster_config: a ClusterConfig. Its meshes determine which roles share devices
        with the rollout.
    """
    meshes = {r.value: m for r, m in (cluster_config.role_to_mesh or {}).items()}
    return lambda query: step_metrics(query, meshes)


def step_metrics(query: PerfSpanQuery, meshes: Mapping[str, Any]) -> dict[str, float]:
  """Returns metrics of the steps since the last export, in seconds.

  The metrics are `perf/global_step_time`, `perf/weight_sync_time`,
  `perf/rollout_idle_time` (the devices of the rollout work for no role), and
  `perf/sum/<phase>_time` and `perf/mean/<phase>_time` for each phase that the steps
  contain: rollout, refer_inference, actor_train, actor_train_step, critic_train,
  critic_train_step. Without a step the result is {}.

  Args:
    query: query over the recorded spans.
    meshes: {role: mesh}; a role without an entry uses the mesh of the actor.
  """
  steps = query().main().all_groups(STEP)
  if not steps.get():
    return {}
  out = {
    "perf/global_step_time": steps.total(),
    "perf/weight_sync_time": steps.all_groups("sync").total(),
    "perf/rollout_idle_time": _idle(query, steps.get(), meshes),
  }
  for name, (role, phase) in _PHASES.items():
    where = steps if role is None else query().timeline(role)
    if spans := where.all_groups(phase).get():
      total = math.fsum(span.duration for span in spans)
      out[f"perf/sum/{name}_time"] = total
      out[f"perf/mean/{name}_time"] = total / len(spans)
  return out


def _idle(query: PerfSpanQuery, steps: list[Span], meshes: Mapping[str, Any]) -> float:
  def mesh_of(role: str) -> Any:
    return meshes.get(role, meshes.get("actor"))

  neighbours = [
    role
    for role in query.timelines
    if not role.startswith(HOST) and mesh_of(role) == mesh_of("rollout")
  ]
  work = [span for role in neighbours for span in query.timelines[role].inner]
  # Work outside of steps, such as the rollouts of an evaluation, does not count.
  within = [_cut(span, step) for step in steps for span in work]
  return busy_seconds(steps) - busy_seconds([span for span in within if span])


def _cut(span: Span, step: Span) -> Span | None:
  """Returns the part of a span that lies in a step; None if they do not overlap."""
  assert span.end is not None and step.end is not None
  begin, end = max(span.begin, step.begin), min(span.end, step.end)
  return Span(span.name, begin, end) if begin < end else None
