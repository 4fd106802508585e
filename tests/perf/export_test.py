import dataclasses

import pytest

from tunix.perf import export
from tunix.perf.export import PerfMetricsExport
from tunix.perf.metrics import PerfSpanQuery
from tunix.perf.span import Span
from tunix.rl.config import Role


@dataclasses.dataclass
class Config:
  role_to_mesh: dict | None = None


def step_query() -> PerfSpanQuery:
  """One step of 10 s after an evaluation of 2 s that sampled for 1 s."""
  evaluation = Span("evaluation", 0.0, 2.0, [Span("rollout", 0.0, 1.0)])
  scoring = Span("scoring", 5.0, 6.0, [Span("refer_inference", 5.0, 6.0)])
  train = [Span("train_step", 6.0, 6.25), Span("train_step", 6.25, 6.5)]
  update = Span("update", 6.0, 9.0, [Span("actor_train", 6.0, 9.0, train)])
  step = Span(
    "global_step",
    2.0,
    12.0,
    [Span("rollout", 2.0, 5.0), scoring, update, Span("sync", 9.0, 9.5)],
  )
  actor = [Span("train_step", 6.0, 7.5), Span("train_step", 7.5, 9.0)]
  return PerfSpanQuery(
    {
      "host": Span("host", 0.0, inner=[evaluation, step]),
      "rollout": Span(
        "rollout",
        0.0,
        inner=[
          Span("rollout", 0.0, 1.0),
          Span("rollout", 2.0, 5.0),
          Span("sync", 9.0, 9.5),
        ],
      ),
      "reference": Span("reference", 0.0, inner=[Span("refer_inference", 5.0, 6.0)]),
      "actor": Span("actor", 0.0, inner=actor),
    }
  )


def test_seconds_by_phase_and_role():
  out = export.seconds(step_query())
  assert out["perf/global_step_sec"] == 10.0
  assert out["perf/rollout_sec"] == 3.0, "that of the evaluation is the evaluation's"
  assert out["perf/evaluation_sec"] == 2.0
  assert out["perf/train_step_sec"] == 0.5 and out["perf/update_sec"] == 3.0
  assert out["perf/busy/actor_sec"] == 3.0, "the devices take longer than the dispatch"
  assert out["perf/busy/rollout_sec"] == 4.5 and out["perf/busy/reference_sec"] == 1.0


def test_the_names_that_users_know():
  out = PerfMetricsExport.from_cluster_config(Config())(step_query())
  assert out["perf/global_step_time"] == 10.0
  assert out["perf/weight_sync_time"] == 0.5
  assert out["perf/sum/rollout_time"] == out["perf/mean/rollout_time"] == 3.0
  assert out["perf/sum/refer_inference_time"] == 1.0
  assert out["perf/sum/actor_train_time"] == 3.0
  assert out["perf/sum/actor_train_step_time"] == 3.0
  assert out["perf/mean/actor_train_step_time"] == 1.5
  assert "perf/sum/critic_train_time" not in out


@pytest.mark.parametrize(
  ("meshes", "idle"),
  [
    (None, 2.5),  # 10 s, less 3 of rollout, 1 of scoring, 3 of updates, 0.5 of syncing
    ({Role.ACTOR: "a", Role.ROLLOUT: "b"}, 6.5),  # less 3 of rollout and 0.5
    ({Role.ACTOR: "a", Role.ROLLOUT: "b", Role.REFERENCE: "b"}, 5.5),
    ({Role.ACTOR: "a", Role.ROLLOUT: "b", Role.REFERENCE: "c"}, 6.5),
  ],
)
def test_the_rollouts_devices_are_idle_when_no_role_on_them_works(meshes, idle):
  out = PerfMetricsExport.from_cluster_config(Config(meshes))(step_query())
  assert out["perf/rollout_idle_time"] == pytest.approx(idle)


def test_without_a_step_there_are_no_metrics_of_it():
  empty = PerfSpanQuery({"host": Span("host", 0.0)})
  assert export.step_metrics(empty, {}) == {} == export.seconds(empty)
