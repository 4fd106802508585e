"""What a traced run of reinforcement learning writes: a timeline a role."""

import json
from typing import Any

import pytest

from tests.perf import traces
from tests.rl import clusters
from tests.sft import trainers
from tunix.perf.export import PerfMetricsExport
from tunix.perf.metrics import PerfMetricsConfig, PerfMetricsOptions
from tunix.perf.trace import NoopTracer, PerfTracer
from tunix.rl.ppo.ppo_learner import PPOConfig, PPOLearner
from tunix.rl.rl_cluster import RLCluster
from tunix.sft.config import CheckpointOptions
from tunix.sft.metrics_logger import MetricsLoggerOptions
from tunix.sft.profiler import ProfilerOptions

PHASES = ("rollout", "rewards", "scoring", "update", "sync")


def settings(folder, **options):
  return {
    "metrics_logging_options": MetricsLoggerOptions(folder / "logs"),
    "perf_metrics_options": PerfMetricsOptions(**options),
    "checkpoint_root_directory": str(folder / "checkpoints"),
    "checkpointing_options": CheckpointOptions(save_every_n_steps=1),
    "mini_batch_size": 2,
  }


def rows(folder) -> list[dict]:
  lines = (folder / "logs" / "timings.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


def test_grpo_leaves_its_phases_by_role(tmp_path):
  learner = clusters.grpo(
    {"beta": 0.1},
    reference=clusters.model(seed=1),
    eval_every_n_steps=2,
    **settings(tmp_path),
  )
  learner.train(clusters.prompts(2), clusters.prompts(1, seed=5))
  learner.close()
  events = traces.events(tmp_path / "logs")
  assert set(events) == {"host", "rollout", "reference", "actor"}
  for timeline in events.values():
    traces.check_nesting(timeline)
  host = events["host"]
  steps = traces.named(host, "global_step")
  evaluations = traces.named(host, "evaluation")
  assert (len(steps), len(evaluations)) == (2, 3)  # before, after 2 updates, after 4
  for name in PHASES:
    found = [e for e in traces.named(host, name) if not traces.inside(e, evaluations)]
    assert len(found) == 2 and all(traces.inside(e, steps) for e in found), name
  # What makes up a step takes no longer than it.
  parts = [e for e in host if e["name"] in PHASES and traces.inside(e, steps)]
  assert sum(e["dur"] for e in parts) <= sum(e["dur"] for e in steps)
  for outer, inner, count in (
    ("scoring", "refer_inference", 2),
    ("scoring", "old_logps", 2),
    ("update", "actor_train", 2),
    ("actor_train", "train_step", 4),
  ):
    found = traces.named(host, inner)
    assert len(found) == count, inner
    assert all(traces.inside(e, traces.named(host, outer)) for e in found)
  assert len(traces.named(host, "checkpoint")) == 2
  assert {e["name"] for e in events["actor"]} == {"old_logps", "train_step"}
  assert {e["name"] for e in events["reference"]} == {"refer_inference"}
  # Two of training, three of evaluations; weights go to the engine after each step.
  assert [e["name"] for e in events["rollout"]].count("rollout") == 5
  assert [e["name"] for e in events["rollout"]].count("sync") == 2
  logged = rows(tmp_path)
  for name in ("global_step", *PHASES):
    whole = sum(
      e["dur"] for e in traces.named(host, name) if not traces.inside(e, evaluations)
    )
    train = [row for row in logged if row["mode"] == "train"]
    total = sum(row.get(f"perf/{name}_sec", 0) for row in train)
    assert total == pytest.approx(whole / 1e6, abs=1e-5), name
  assert any(row.get("perf/busy/actor_sec", 0) > 0 for row in logged)
  assert "perf/" not in (tmp_path / "logs" / "metrics.jsonl").read_text()


def test_ppo_has_a_critic(tmp_path):
  cluster = clusters.cluster(critic=True, **settings(tmp_path))
  learner = PPOLearner(cluster, PPOConfig(beta=0.0), clusters.even)
  learner.train(clusters.prompts(1))
  learner.close()
  events = traces.events(tmp_path / "logs")
  names = [e["name"] for e in events["critic"]]
  assert (names.count("values"), names.count("train_step")) == (1, 2)
  (trained,) = traces.named(events["host"], "critic_train")
  assert traces.inside(trained, traces.named(events["host"], "update"))


def test_the_metrics_that_users_know_by_perf_config(tmp_path):
  config = clusters.config(
    metrics_logging_options=MetricsLoggerOptions(tmp_path / "logs")
  )
  export = PerfMetricsExport.from_cluster_config(config)
  cluster = RLCluster(
    actor=clusters.model(),
    tokenizer=clusters.Words(),
    cluster_config=config,
    perf_config=PerfMetricsConfig(custom_export_fn=export),
  )
  assert isinstance(cluster.perf, PerfTracer)
  learner = clusters.GRPOLearner(
    cluster, clusters.GRPOConfig(num_generations=2, beta=0.0), clusters.even
  )
  learner.train(clusters.prompts(1))
  learner.close()
  (row,) = [row for row in rows(tmp_path) if "perf/global_step_time" in row]
  assert row["perf/sum/rollout_time"] == row["perf/mean/rollout_time"] > 0
  assert 0 <= row["perf/rollout_idle_time"] < row["perf/global_step_time"]
  assert row["perf/sum/rollout_time"] == pytest.approx(row["perf/rollout_sec"], rel=0.1)
  assert (tmp_path / "logs" / "perf_trace.json").exists(), "beside the metrics"


def test_an_untraced_run_makes_no_span_and_learns_the_same(monkeypatch):
  weights = []
  choices: list[dict[str, Any]] = [{}, {"perf_metrics_options": PerfMetricsOptions()}]
  for options in choices:
    with traces.counted(monkeypatch) as cost:
      learner = clusters.grpo(**options)
      assert (type(learner.rl_cluster.perf) is NoopTracer) == (not options)
      learner.train(clusters.prompts(2))
    assert bool(cost.phases) == bool(cost.spans) == bool(cost.clock) == bool(options)
    weights.append(learner.rl_cluster.actor_trainer.model)
    logger = learner.rl_cluster.logger
    assert all(logger.metric_exists("", f"perf/{x}_sec", "train") for x in PHASES[:2])
    learner.close()
  assert trainers.equal(*map(trainers.leaves, weights))


def test_a_run_honours_the_profiler_of_its_config(tmp_path):
  learner = clusters.grpo(
    mini_batch_size=2, profiler_options=ProfilerOptions(tmp_path, 1, 2)
  )
  learner.train(clusters.prompts(2))
  learner.close()
  assert len(list(tmp_path.rglob("*.trace.json.gz"))) == 1
