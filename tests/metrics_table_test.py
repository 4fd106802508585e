"""docs/metrics.md: the tables are current, and runs write what they say.

Each job of `JOBS` runs an update and an evaluation. Its metrics files must hold every
metric that its modules declare without a condition, the conditional ones that the job
lists, and nothing else.
"""

import functools
import json
import pathlib
import re
from collections.abc import Collection
from typing import Any, NamedTuple

import pytest

from tests import metrics_table, optimizers, toys
from tests.distillation import trainers as distillation
from tests.rl import clusters
from tests.rl.env import toy_envs
from tests.sft import trainers
from tests.sft.dpo import preferences
from tunix.distillation.strategies import (
  FeaturePoolingStrategy,
  LogitStrategy,
  PolicyGradientStrategy,
)
from tunix.models import heads
from tunix.models.transformer.config import MoEConfig
from tunix.models.transformer.decoder_layer import DecoderLayer
from tunix.perf.export import PerfMetricsExport
from tunix.perf.metrics import PerfMetricsConfig, PerfMetricsOptions
from tunix.report import measures
from tunix.rl.algorithm_config import RolloutCorrection
from tunix.rl.grpo.dapo_learner import DAPOConfig, DAPOLearner
from tunix.rl.grpo.sdpo_learner import SDPOConfig, SDPOLearner
from tunix.rl.ppo.ppo_learner import PPOConfig, PPOLearner
from tunix.rl.prompts.curriculum import CurriculumConfig
from tunix.rl.rl_cluster import RLCluster
from tunix.rl.utils import create_critic_model
from tunix.sft.dpo.kto_trainer import KTOTrainer
from tunix.sft.dpo.reward_trainer import RewardConfig, RewardTrainer
from tunix.sft.metrics.jsonl import METRICS_FILE, TIMINGS_FILE, JsonlBackend
from tunix.sft.metrics_logger import MetricsLoggerOptions
from tunix.sft.steps import step_metrics
from tunix.utils.metric import Metric

ROOT = pathlib.Path(__file__).parent.parent
# Metrics that no job of this test writes. A CPU does not report the first two. The
# others are in rl/replay_routes_test.py, rl/processes_test.py and
# cli/train_judge_test.py.
ELSEWHERE = {
  *("mfu", "device_memory_bytes", "router/replaced", "perf/exchange_wait_sec"),
  *("perf/judge_prompt_tokens", "perf/judge_answer_tokens"),
}
ELSEWHERE |= {"score_centering/head"}


def logging(folder: pathlib.Path) -> dict[str, Any]:
  options = MetricsLoggerOptions(
    folder, backend_factories=[lambda: JsonlBackend(folder)]
  )
  return {"metrics_logging_options": options, "eval_every_n_steps": 1}


def sft(**options: Any) -> None:
  tracing = PerfMetricsOptions(enable_trace_writer=False)
  t = trainers.trainer(learning_rate=0.01, perf_metrics_options=tracing, **options)
  t.train([trainers.small(0)], [trainers.small(1)])
  t.close()


def experts(**options: Any) -> None:
  moe = MoEConfig(num_experts=4, experts_per_token=2, hidden_dim=8)
  t = trainers.trainer(toys.model(num_layers=1, moe=moe), **options)
  t.train([toys.batch(0)], [toys.batch(1)])
  t.close()


def dpo(loss: str, **options: Any) -> None:
  model = preferences.model()
  needs = loss == "sigmoid"
  reference = preferences.model(1) if needs else None
  t = preferences.trainer(model, reference, loss=loss, **options)
  t.train([preferences.pairs()], [preferences.pairs(1)])
  t.close()


def kto(**options: Any) -> None:
  models = [preferences.model(seed) for seed in (0, 1)]
  t = preferences.trainer(*models, kind=KTOTrainer, **options)
  t.train([preferences.labelled()], [preferences.labelled(1)])
  t.close()


def reward(**options: Any) -> None:
  model = heads.with_scores(preferences.model())
  t = RewardTrainer(
    model, optimizers.adam(1e-3), RewardConfig(pbar_description=None, **options)
  )
  t.train([preferences.pairs()], [preferences.pairs(1)])
  t.close()


def distill(strategy: Any, **options: Any) -> None:
  models = {"student": toys.model(num_layers=1), "known": toys.model(1, num_layers=1)}
  t = distillation.trainer(strategy, **models, **options)
  t.train([toys.batch(0)], [toys.batch(1)])
  t.close()


def on_policy(**options: Any) -> None:
  student = toys.model(num_layers=1)
  t = distillation.on_policy(PolicyGradientStrategy(), student=student, **options)
  t.train([distillation.prompts()], [distillation.prompts(1)])
  t.close()


def dapo(**options: Any) -> None:
  """DAPO with everything on that is off by default, and a trace."""
  algorithm = DAPOConfig(
    num_generations=4,
    beta=0.1,
    entropy_coef=0.01,
    rollout_correction=RolloutCorrection(),
    pass_threshold=0.5,
    curriculum=CurriculumConfig(),
    eval_num_generations=2,
  )
  cluster = clusters.cluster(
    reference=clusters.model(1),
    perf_metrics_options=PerfMetricsOptions(enable_trace_writer=False),
    **options,
  )
  learner = DAPOLearner(cluster, algorithm, clusters.even)
  learner.train(clusters.prompts(1), clusters.prompts(1, seed=1))
  learner.close()


def sdpo(**options: Any) -> None:
  settings = {"num_generations": 4, "eval_num_generations": 2, **clusters.HINTS}
  algorithm = SDPOConfig(success_threshold=0.5, **settings)
  learner = SDPOLearner(clusters.cluster(**options), algorithm, clusters.even)
  learner.train(clusters.prompts(1), clusters.prompts(1, seed=1))
  learner.close()


def episodes(**options: Any) -> None:
  learner = clusters.GRPOLearner(
    clusters.cluster(schedule="lagged", **options),
    clusters.GRPOConfig(
      num_generations=4, beta=0.0, eval_num_generations=2, observation_weight=0.1
    ),
    env=toy_envs.Echo,
  )
  learner.train(clusters.prompts(1), clusters.prompts(1, seed=1))
  learner.close()


def greedy(**options: Any) -> None:
  learner = clusters.grpo({"eval_num_generations": 2}, schedule="greedy", **options)
  learner.train(clusters.prompts(1), clusters.prompts(1, seed=1))
  learner.close()


def ppo(**options: Any) -> None:
  actor: Any = clusters.model()
  config = clusters.config(critic_optimizer=optimizers.adam(1e-3), **options)
  export = PerfMetricsExport.from_cluster_config(config)
  cluster = RLCluster(
    actor=actor,
    critic=create_critic_model(actor, seed=1),
    reference=clusters.model(1),
    tokenizer=clusters.Words(),
    cluster_config=config,
    perf_config=PerfMetricsConfig(custom_export_fn=export),
  )
  clusters.stamped(cluster, 1)
  algorithm = PPOConfig(beta=0.1, rollout_correction=RolloutCorrection(kind="mask"))
  learner = PPOLearner(cluster, algorithm, clusters.even)
  learner.train(clusters.prompts(1), clusters.prompts(1, seed=1))
  learner.close()


class Job(NamedTuple):
  """A job that logs.

  Attributes:
    run: runs it with further settings of training.
    tables: (tuple of metrics, prefix) of what it declares.
    conditional: names of metrics with a condition that it must log, with their prefix.
  """

  run: Any
  tables: list[tuple[str, str]]
  conditional: set[str]


def job(run: Any, *tables: str, conditional: Collection[str] = ()) -> Job:
  """A job of tables "MODULE.NAME" or "MODULE.NAME PREFIX"."""
  split = [(table, prefix) for table, _, prefix in (t.partition(" ") for t in tables)]
  return Job(run, split, set(conditional))


STEP = "tunix.sft.steps.step_metrics.METRICS"
PAIRS = "tunix.ops.preference.METRICS"
DISTILL = "tunix.distillation.strategies."
RL = [
  *("tunix.rl.metrics.METRICS", "tunix.rl.experience.evaluation.METRICS"),
  *(f"{STEP} actor/", "tunix.rl.policy_loss.METRICS actor/"),
]
TOKENS = {"perplexity", "trained_tokens", "tokens_per_sec", "tflops_per_sec"}
PARITY = {f"actor/parity/{name}" for name in ("abs_diff", "ratio", "kl")}
CORRECTION = "actor/rollout_correction/"
WEIGHTS = {f"{CORRECTION}weight", f"{CORRECTION}effective_sample_size"}
TRACE = {"perf/<phase>_sec", "perf/busy/<role>_sec"}
ODDS = {"sft_loss", "or_loss", "odds_ratio"}
JOBS = {
  "sft": job(
    sft,
    *(STEP, "tunix.perf.export.METRICS"),
    conditional=TOKENS | TRACE | {"learning_rate"},
  ),
  "experts": job(
    experts,
    *(STEP, "tunix.sft.steps.router_losses.METRICS"),
    conditional=TOKENS
    | {f"router/{x}" for x in ("balance_loss", "z_loss", "entropy", "max_share")},
  ),
  "dpo": job(functools.partial(dpo, "sigmoid"), STEP, PAIRS, conditional={"kl"}),
  "orpo": job(
    functools.partial(dpo, "orpo"),
    *(STEP, PAIRS, "tunix.ops.pair_losses.METRICS"),
    conditional=ODDS,
  ),
  "kto": job(kto, STEP, "tunix.ops.kto.METRICS"),
  "reward": job(reward, STEP, "tunix.ops.reward_loss.METRICS"),
  "logits": job(
    functools.partial(distill, LogitStrategy()),
    *(STEP, f"{DISTILL}logit.METRICS"),
    conditional={"distill/teacher_loss"},
  ),
  "features": job(
    functools.partial(distill, FeaturePoolingStrategy(feature_layer=DecoderLayer)),
    *(STEP, f"{DISTILL}feature_pooling.METRICS"),
  ),
  "on-policy": job(on_policy, STEP, f"{DISTILL}policy_gradient.METRICS"),
  "dapo": job(
    dapo,
    *(
      *RL,
      "tunix.rl.grpo.dapo_learner.METRICS",
      "tunix.rl.prompts.curriculum.METRICS",
      "tunix.perf.export.METRICS",
    ),
    conditional=TRACE
    | PARITY
    | {f"rewards/score/prompt_p{percent}" for percent in (25, 75)}
    | {"groups/all_equal", "dynamic_sampling/refills", "pass@<k>"}
    | {m.name for m in metrics_table.declared("tunix.rl.prompts.curriculum")}
    | {"actor/kl", "actor/entropy", f"{CORRECTION}truncated", *WEIGHTS},
  ),
  "episodes": job(
    episodes,
    *(*RL, "tunix.rl.experience.episodes.METRICS"),
    conditional=PARITY
    | {f"rewards/score/prompt_p{percent}" for percent in (25, 75)}
    | {"groups/all_equal", "perf/data_wait_sec", "staleness/mean", "staleness/max"}
    | {f"{CORRECTION}truncated", *WEIGHTS, "actor/observation_loss"}
    | {
      metric.name for metric in metrics_table.declared("tunix.rl.experience.episodes")
    },
  ),
  "sdpo": job(
    sdpo,
    *(*RL, "tunix.rl.grpo.sdpo_learner.METRICS"),
    conditional=PARITY
    | {f"rewards/score/prompt_p{percent}" for percent in (25, 75)}
    | {"groups/all_equal", "sdpo/hinted", "sdpo/reverse_kl"},
  ),
  "greedy": job(
    greedy,
    *RL,
    conditional=PARITY
    | {f"rewards/score/prompt_p{percent}" for percent in (25, 75)}
    | {"groups/all_equal", "perf/data_wait_sec", "staleness/mean", "staleness/max"}
    | {f"perf/{name}_sec" for name in ("engine_idle", "queue_age")}
    | {f"{CORRECTION}truncated", *WEIGHTS, "perf/episodes_in_flight"},
  ),
  "ppo": job(
    ppo,
    *(*RL, f"{STEP} critic/", "tunix.rl.policy_loss.CRITIC_METRICS critic/"),
    *("tunix.rl.experience.experience.METRICS", "tunix.perf.export.STEP_METRICS"),
    conditional=PARITY
    | {"staleness/mean", "staleness/max", f"{CORRECTION}masked", *WEIGHTS}
    | {"rewards/kl", "perf/global_step_time", "perf/weight_sync_time"}
    | {"perf/rollout_idle_time", "perf/sum/<phase>_time", "perf/mean/<phase>_time"},
  ),
}


def declared(job: Job) -> dict[str, Metric]:
  """What a job declares, by name with the prefix of a role.

  Roles have metrics of training only, because an evaluation makes no update.
  """
  return {
    prefix + metric.name: metric._replace(modes="train") if prefix else metric
    for table, prefix in job.tables
    for metric in metrics_table.declared(*table.rsplit(".", 1))
  }


def written(folder: pathlib.Path) -> set[tuple[str, str, str]]:
  """(file, mode, name) of everything that a job wrote."""
  return {
    (file, record["mode"], name)
    for file in (METRICS_FILE, TIMINGS_FILE)
    for line in (folder / file).read_text().splitlines()
    for record in [json.loads(line)]
    for name in record.keys() - {"step", "mode"}
  }


def as_declared(name: str, names: dict[str, Metric]) -> str:
  """The declared name that a written one is; itself if there is none."""
  if name in names:
    return name
  for one in names:
    if re.fullmatch(re.sub(r"<\w+>", r"[^/]+", one), name):
      return one
  return name


@pytest.mark.parametrize("name", JOBS)
def test_a_job_writes_what_is_declared(name, tmp_path):
  job = JOBS[name]
  job.run(**logging(tmp_path))
  known = declared(job)
  want = {
    (metrics_table.file_of(one), mode, one)
    for one, metric in known.items()
    if not metric.condition or one in job.conditional
    for mode in metric.modes.split(", ")
  }
  got = {(file, mode, as_declared(one, known)) for file, mode, one in written(tmp_path)}
  assert (got - want, want - got) == (set(), set())  # undeclared, not written


def test_every_table_and_every_condition_has_a_job():
  tables = {f"{module}.{name}" for module, name, _ in metrics_table.places()}
  assert tables == {table for job in JOBS.values() for table, _ in job.tables}
  met = {name.split("actor/")[-1] for job in JOBS.values() for name in job.conditional}
  conditional = {
    metric.name
    for job in JOBS.values()
    for metric in declared(job).values()
    if metric.condition
  }
  assert conditional - met == ELSEWHERE


def test_every_declaration_has_a_table():
  modules = {
    str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
    for path in (ROOT / "tunix").rglob("*.py")
    if re.search(r"^\w*METRICS = \(\n  Metric\(", path.read_text(), re.M)
  }
  assert modules == {module for module, _, _ in metrics_table.places()}


def test_the_page_is_current():
  assert metrics_table.PAGE.read_text() == metrics_table.page(), (
    "docs/metrics.md is out of date: python -m tests.metrics_table"
  )


def test_charts_and_the_bar_show_declared_metrics():
  known = {
    metric.name
    for module, name, _ in metrics_table.places()
    for metric in metrics_table.declared(module, name)
  }
  shown = {*measures._TITLES, *step_metrics._WATCHED, *step_metrics._DETAILS}
  assert shown <= known
  examples = {re.sub(r"<\w+>", "1", name) for name in known}
  assert measures.OTHERS not in measures.arrange(examples)
