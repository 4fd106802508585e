"""Metrics of the spans of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tunix.perf.metrics import HOST, MetricsExportFn, PerfSpanQuery
from tunix.perf.span import Span, busy_seconds

EVALUATION = "evaluation"
STEP = "global_step"

# Names that users know -> (timeline, span). None: the host's.
_PHASES: dict[str, tuple[str | None, str]] = {
  "rollout": (None, "rollout"),
  "refer_inference": (None, "refer_inference"),
  "actor_train": (None, "actor_train"),
  "actor_train_step": ("actor", "train_step"),
  "critic_train": (None, "critic_train"),
  "critic_train_step": ("critic", "train_step"),
}


def seconds(query: PerfSpanQuery) -> dict[str, float]:
  """perf/<phase>_sec, as the host spent them, and perf/busy/<role>_sec, in which the
  devices of a role were at work.

  What is nested counts in both. An evaluation's phases count as the evaluation alone:
  a step's rollouts are not those of an evaluation before it.
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
  """The metrics of a step of reinforcement learning, by the names that users know."""

  @staticmethod
  def from_cluster_config(cluster_config: Any) -> MetricsExportFn:
    """A function that makes them; see `step_metrics`.

    Args:
      cluster_config: a ClusterConfig: which roles share the rollout's devices.
    """
    meshes = {r.value: m for r, m in (cluster_config.role_to_mesh or {}).items()}
    return lambda query: step_metrics(query, meshes)


def step_metrics(query: PerfSpanQuery, meshes: Mapping[str, Any]) -> dict[str, float]:
  """Metrics of the steps since the last export, in seconds; {} when there was none.

  perf/global_step_time, perf/weight_sync_time; perf/rollout_idle_time, in which the
  rollout's devices did nothing for any role that lies on them; perf/sum/<phase>_time
  and perf/mean/<phase>_time of rollout, refer_inference, actor_train, actor_train_step,
  critic_train, critic_train_step, as far as the step has them.

  Args:
    query: of the spans.
    meshes: by role; a role without one lies with the actor.
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

  here = [
    role
    for role in query.timelines
    if not role.startswith(HOST) and mesh_of(role) == mesh_of("rollout")
  ]
  busy = [span for role in here for span in query.timelines[role].inner]
  within = [_cut(span, step) for step in steps for span in busy]
  return busy_seconds(steps) - busy_seconds([span for span in within if span])


def _cut(span: Span, step: Span) -> Span | None:
  """The part of a span that lies in a step: an evaluation's rollouts do not."""
  assert span.end is not None and step.end is not None
  begin, end = max(span.begin, step.begin), min(span.end, step.end)
  return Span(span.name, begin, end) if begin < end else None
