"""The loop of RL: what it samples, cuts, logs, saves and refuses."""

import dataclasses
import json

import numpy as np
import optax
import pytest

from tests import toys
from tests.generate import scored
from tests.rl import clusters
from tests.sft import trainers
from tunix.cli import config as config_lib
from tunix.cli.jobs import rl
from tunix.cli.settings import keys
from tunix.models import heads
from tunix.ops import advantages
from tunix.rl import learner_state, setup
from tunix.rl.algorithm_config import KINDS, RolloutCorrection
from tunix.rl.grpo.dapo_learner import DAPOConfig, DAPOLearner, OverlongBuffer
from tunix.rl.grpo.drgrpo_learner import DrGRPOConfig, DrGRPOLearner
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.grpo.rloo_learner import RLOOConfig, RLOOLearner
from tunix.rl.learner_state import LearnerProgress
from tunix.rl.pipeline import PromptSource, prompt_batch
from tunix.rl.ppo.ppo_learner import PPOConfig, PPOLearner
from tunix.rl.prompts.curriculum import CurriculumConfig
from tunix.rl.reward.rewards import RewardManager
from tunix.rl.rl_cluster import Role
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.sft.best import BestOptions
from tunix.sft.metrics_logger import MetricsLoggerOptions, Mode
from tunix.sft.peft_trainer import CheckpointOptions
from tunix.utils import mesh as mesh_lib


def weights(learner):
  return trainers.leaves(learner.rl_cluster.actor_trainer.model)


def same(a, b):
  return all(np.array_equal(a[name], b[name]) for name in a)


def test_training_moves_the_actor_and_logs():
  learner = clusters.grpo()
  before = weights(learner)
  learner.train(clusters.prompts(2))
  assert learner.train_steps == 2
  assert not same(before, weights(learner))
  logger = learner.rl_cluster.logger
  for name in (
    "rewards/score/mean",
    "rewards/even",
    "rewards/failed",
    "completions/mean_length",
    "completions/truncated",
    "groups/all_equal",
  ):
    assert logger.metric_exists("", name, Mode.TRAIN), name
  for name in ("loss", "pg_clipfrac", "parity/abs_diff"):
    assert logger.metric_exists("actor", name, Mode.TRAIN), name
  assert logger.get_metric("actor", "parity/abs_diff", Mode.TRAIN) < 1e-4


def slow(value):
  return pytest.param(value, marks=pytest.mark.slow)


@pytest.mark.parametrize(
  "change",
  [
    {"algorithm": {"beta": 0.5}, "reference": "same"},
    {"algorithm": {"loss_algo": "gspo", "num_iterations": 2}},
    slow(
      {"algorithm": {"loss_algo": "cispo", "num_iterations": 2, "epsilon_high": 0.01}}
    ),
    {"algorithm": {"num_iterations": 2}},
    slow({"algorithm": {"epsilon": 0.0, "num_iterations": 2}}),
    slow({"algorithm": {"epsilon_c": 1.01, "num_iterations": 2, "epsilon": 0.001}}),
    slow({"algorithm": {"loss_agg_mode": "sequence-mean-token-sum"}}),
    slow({"algorithm": {"advantage_estimator": "group_centered"}}),
    slow({"algorithm": {"entropy_coef": 0.1}}),
    {"mini_batch_size": 2},
    slow({"rollout": {"temperature": 0.5}}),
    slow({"rollout": {"seed": 1}}),
    {"rollout": {"top_k": 2}},
  ],
  ids=str,
)
def test_settings_change_what_is_learnt(change, plain_weights):
  change = dict(change)
  if change.get("reference"):
    change["reference"] = clusters.model(seed=1)
  learner = clusters.grpo(change.pop("algorithm", None), **change)
  learner.train(clusters.prompts(2))
  assert not same(plain_weights, weights(learner))


def test_truncated_completions_can_be_left_out():
  ends = {"eos_tokens": list(range(1, toys.VOCAB, 4))}  # most completions end
  learners = [clusters.grpo(x, rollout=ends) for x in ({}, {"mask_truncated": True})]
  for learner in learners:
    learner.train(clusters.prompts(1))
  assert not same(*map(weights, learners))


@pytest.fixture(scope="module")
def plain_weights():
  learner = clusters.grpo()
  learner.train(clusters.prompts(2))
  return weights(learner)


def close(a, b, tolerance=2e-5):
  return all(np.allclose(a[name], b[name], atol=tolerance) for name in a)


@pytest.mark.parametrize(
  "change",
  [
    {"train_micro_batch_size": 1},
    {
      "train_micro_batch_size": 2,
      "compute_logps_micro_batch_size": 2,
      "rollout_micro_batch_size": 2,
    },
    {"algorithm": {"shared_prompt": False}},
    {"algorithm": {"exact_tile_rows": 4}},
  ],
  ids=str,
)
def test_how_the_work_is_cut_changes_nothing(change, plain_weights):
  change = dict(change)
  learner = clusters.grpo(change.pop("algorithm", None), **change)
  learner.train(clusters.prompts(2))
  assert close(plain_weights, weights(learner))


def test_the_last_partial_batch_is_learnt_from():
  short = clusters.prompts(1)[0]
  cut = {name: values[:3] for name, values in short.items()}
  learner = clusters.grpo()
  with trainers.compilations() as names:
    learner.train([short, cut])
  assert learner.train_steps == 2
  assert names.count("jit(step)") == 1, names


def test_max_steps_ends_inside_a_batch():
  learner = clusters.grpo({"num_iterations": 3}, max_steps=4)
  learner.train(clusters.prompts(5))
  assert learner.train_steps == 4


@pytest.mark.parametrize(
  ("algorithm", "steps"),
  [
    ({"num_iterations": 2}, 8),
    # Prompts wait from step to step, because half of the new ones are skipped.
    (
      {
        "curriculum": CurriculumConfig(easy_from=0.5, hard_chance=0.5),
        "pass_threshold": 0.5,
      },
      16,
    ),
  ],
  ids=["plain", "curriculum"],
)
def test_resume_is_exact(tmp_path, algorithm, steps):
  def make(folder, **options):
    return clusters.grpo(
      {"num_iterations": 2, **algorithm},
      checkpoint_root_directory=str(tmp_path / folder / "ckpt"),
      checkpointing_options=CheckpointOptions(save_every_n_steps=2),
      metrics_logging_options=MetricsLoggerOptions(tmp_path / folder / "logs"),
      data_shuffle_seed=3,
      mini_batch_size=2,
      **options,
    )

  # The same prompts again and again, so that a curriculum knows them.
  data = clusters.prompts(2) * 4
  whole = make("whole", max_steps=steps)
  whole.train(data)
  whole.close()
  cut = make("cut", max_steps=steps // 2)
  cut.train(data)
  cut.close()
  again = make("cut", max_steps=steps)
  assert again.train_steps == steps // 2
  again.train(data)
  again.close()
  assert same(weights(whole), weights(again))
  lines = [
    (tmp_path / f / "logs" / "metrics.jsonl").read_bytes() for f in ("whole", "cut")
  ]
  assert lines[0] == lines[1]


def test_a_run_goes_on_with_the_sampler_it_began_with(tmp_path, monkeypatch, caplog):
  """A checkpoint of an earlier version names no sampler: the padded one drew."""

  def run(folder, steps, **options):
    made = saving(tmp_path / folder, max_steps=steps, **options)
    made.train(clusters.prompts(4))
    made.close()
    return made

  whole = run("whole", 4, rollout_engine="padded")
  of_run = learner_state.of_run

  def unnamed(*args):
    state = of_run(*args)
    del state.progress["sampler"]
    return state

  monkeypatch.setattr(learner_state, "of_run", unnamed)
  run("cut", 2, rollout_engine="padded")
  monkeypatch.undo()
  again = run("cut", 4)
  assert again.rl_cluster.rollout.sampler == "padded"
  assert "begun with the padded sampler" in caplog.text
  assert same(weights(whole), weights(again))
  new = run("new", 2)
  assert new.rl_cluster.rollout.sampler == "engine"
  with pytest.raises(ValueError, match="begun with the sampler 'engine'"):
    run("new", 4, rollout_engine="padded")


def saving(folder, every=1, **options):
  return clusters.grpo(
    checkpoint_root_directory=str(folder),
    checkpointing_options=CheckpointOptions(save_every_n_steps=every),
    **options,
  )


@pytest.mark.parametrize("where", ["sync", "update"])
def test_an_update_that_breaks_off_is_not_saved(tmp_path, where, monkeypatch):
  data = clusters.prompts(3)
  whole = clusters.grpo(mini_batch_size=2)
  whole.train(data)
  learner = saving(tmp_path, mini_batch_size=2)
  cluster, trainer = learner.rl_cluster, learner.rl_cluster.actor_trainer
  owner, name = (cluster, "sync_weights") if where == "sync" else (trainer, "_learn")
  real, calls = getattr(owner, name), []

  def broken(*args):
    calls.append(1)
    if len(calls) == 2 + 2 * (where == "update"):  # in the second batch of rollouts
      raise ConnectionError("the engine is gone")
    return real(*args)

  monkeypatch.setattr(owner, name, broken)
  with pytest.raises(ConnectionError):
    learner.train(data)
  with pytest.raises(RuntimeError, match="an update failed"):
    learner.train(data)
  learner.close()
  again = saving(tmp_path, mini_batch_size=2)
  assert again.train_steps == 2
  again.train(data)
  assert same(weights(whole), weights(again))


def test_each_call_of_train_starts_the_prompts_anew(tmp_path):
  data = clusters.prompts(2)
  learner = saving(tmp_path)
  learner.train(data)
  learner.train(data)
  assert learner.train_steps == 4
  learner.train(iter(data[:1]))
  assert learner.train_steps == 5
  learner.close()
  again = saving(tmp_path)
  for batches in (data, data, data[:1], data):
    again.train(batches)
  assert again.train_steps == 7


def test_a_generator_goes_on_after_a_failure():
  data, failures = iter(clusters.prompts(3)), []

  def once(prompts, completions, **columns):
    if len(failures) == 1:
      failures.append(2)
      return [float("nan")] * len(prompts)
    failures.append(1)
    return clusters.even(prompts, completions)

  learner = clusters.grpo(reward_fns=once)
  with pytest.raises(ValueError, match="every reward failed"):
    learner.train(data)
  learner.train(data)  # the batch that failed is given once more
  assert learner.train_steps == 3


@pytest.mark.parametrize("learner_class", [GRPOLearner, DrGRPOLearner, RLOOLearner])
def test_equal_rewards_teach_nothing(learner_class, caplog):
  configs = {DrGRPOLearner: DrGRPOConfig, RLOOLearner: RLOOConfig}
  config = configs.get(learner_class, GRPOConfig)(num_generations=4, beta=0.0)
  learner = learner_class(
    clusters.cluster(), config, lambda prompts, completions, **c: [0.5] * len(prompts)
  )
  before = weights(learner)
  result = learner.train(clusters.prompts(1))
  assert same(before, weights(learner))
  (note,) = result.notes
  assert "the gradient was 0 in 1 step" in note and "equal rewards" in note
  assert note in caplog.text


def test_the_bar_shows_the_reward_of_its_own_step(capsys):
  batches = iter([0.25, 0.75])

  def reward(prompts, completions, **columns):
    mean = next(batches)
    return [mean + (-1) ** row / 4 for row in range(len(prompts))]

  learner = clusters.grpo(reward_fns=reward, pbar_description="Run", max_steps=2)
  result = learner.train(clusters.prompts(2))
  learner.close()
  shown = [line for line in capsys.readouterr().err.splitlines() if "step" in line]
  assert ["reward=0.25" in shown[0], "reward=0.75" in shown[1]] == [True, True]
  assert not result.notes


def test_prompts_that_are_all_solved_at_the_end_end_the_run():
  data = clusters.prompts(3)

  def solved(prompts, completions, number, **columns):
    last = [p in data[2]["prompts"] for p in prompts]
    values = clusters.even(prompts, completions)
    return [1.0 if done else value for done, value in zip(last, values)]

  learner = DAPOLearner(clusters.cluster(), DAPOConfig(num_generations=4), solved)
  learner.train(data)
  assert learner.train_steps >= 1


def test_checkpoints_keep_their_cadence_over_several_updates(tmp_path):
  learner = saving(tmp_path, every=4, algorithm={"num_iterations": 3})
  steps = []
  save = learner._run._checkpoints.save_state
  learner._run._checkpoints.save_state = lambda step, *a, **k: (
    steps.append(step),
    save(step, *a, **k),
  )
  learner.train(clusters.prompts(5))
  assert steps == [6, 9, 12, 15]  # the first places behind 4, 8, 12, and the end


def test_a_run_goes_on_from_its_own_base_only(tmp_path):
  def make(seed):
    return saving(tmp_path, actor=clusters.model(seed=seed, lora_rank=2))

  learner = make(0)
  learner.train(clusters.prompts(1))
  learner.close()
  with pytest.raises(ValueError, match="frozen weights"):
    make(1)


def test_a_failed_evaluation_is_made_up_for(tmp_path):
  learner = saving(tmp_path)
  with pytest.raises(TypeError, match="a batch is"):
    learner.train(clusters.prompts(1), [3])
  assert learner._progress.evaluated_at == -1


def test_pass_at_k_counts_rewards_before_they_are_shaped():
  config = DAPOConfig(
    num_generations=4, pass_threshold=1.0, overlong_buffer=OverlongBuffer(tokens=6)
  )
  learner = DAPOLearner(
    clusters.cluster(), config, lambda prompts, completions, **c: [1.0] * len(prompts)
  )
  found = learner.evaluate(clusters.prompts(1))
  assert found["rewards/score/mean"] == found["pass@1"] == 1.0


def test_rloo_s_kl_is_part_of_the_reward():
  def example(beta):
    cluster = clusters.cluster(
      **({"reference": clusters.model(seed=1)} if beta else {})
    )
    config = RLOOConfig(num_generations=4, beta=beta)
    learner = RLOOLearner(cluster, config, clusters.even)
    return learner._collect(PromptSource(clusters.prompts(1))), learner

  (plain, _), (kept, learner) = example(0.0), example(0.5)
  assert kept.ref_per_token_logps is None  # not in the loss
  rows = dataclasses.replace(kept, group_size=4)
  gap = (
    kept.old_per_token_logps - learner.rl_cluster.get_ref_per_token_logps(rows)
  ) * kept.completion_mask
  penalty = 0.5 * gap.sum(1).reshape(-1, 4)
  others = (penalty.sum(1, keepdims=True) - penalty) / 3
  want = np.asarray(plain.advantages).reshape(-1, 4) - (penalty - others)
  np.testing.assert_allclose(kept.advantages.reshape(-1, 4), want, atol=1e-5)


def test_settings_out_of_range_fail_before_anything_is_sampled():
  for options, message in (
    ({"epsilon_c": 1.1}, "above the upper clip"),
    ({"epsilon_low": 1.5}, "epsilon_low is 1.5"),
    ({"loss_algo": "rloo"}, "ratio of its whole row"),
    ({"kl_corrected": True, "beta": 0.0}, "kl_corrected"),
  ):
    with pytest.raises(ValueError, match=message):
      GRPOConfig(**options)
  with pytest.raises(ValueError, match="low is"):
    RolloutCorrection(kind="mask", low=1.0, high=1.0)
  with pytest.raises(ValueError, match="level is"):
    RolloutCorrection(level="row")


MAY_FILTER = {"top_p": 1.0, "min_p": 0.0}  # values that keep every token
FILTERS = {"top_p": 0.5, "top_k": 3, "min_p": 0.1}


@pytest.mark.parametrize("kind", [None, *(k for k in KINDS if k != "off")])
@pytest.mark.parametrize("name", FILTERS)
def test_a_correction_refuses_probabilities_of_a_part_of_the_tokens(kind, name):
  rule = None if kind is None else RolloutCorrection(kind=kind)
  config, sampling = GRPOConfig(rollout_correction=rule), RolloutConfig(**MAY_FILTER)
  message = f"rollout.{name} is {FILTERS[name]} .*kind is {kind or 'truncate'}"
  stale = int(kind is None)  # such rollouts have a correction by default
  setup.check_support(sampling, config, stale)
  sampling = dataclasses.replace(sampling, **{name: FILTERS[name]})
  with pytest.raises(ValueError, match=message):
    setup.check_support(sampling, config, stale)
  off = GRPOConfig(rollout_correction=RolloutCorrection(kind="off"))
  for staleness in 0, 1:
    setup.check_support(sampling, off, staleness)
  setup.check_support(sampling, GRPOConfig(), 0)


def test_learners_and_the_command_refuse_filters_with_a_correction():
  rule = {"rollout_correction": RolloutCorrection()}
  with pytest.raises(ValueError, match=r"rollout.top_p is 0.5 .*kind is truncate"):
    clusters.grpo(rule, rollout={"top_p": 0.5})
  words = ["--job=grpo", "--rl.schedule=lagged", "--rollout.top_k=5"]
  config = config_lib.load(words)  # as an older version may have written it
  with pytest.raises(ValueError, match=r"rollout.top_k.*rollouts have by default"):
    rl.check(config)
  rl.check(config_lib.load([*words, "--algorithm.rollout_correction.kind=off"]))
  free = keys.of_config(config_lib.load(["--job=grpo"]))
  assert free["algorithm.rollout_correction"].facts.may_change


def test_metric_functions_are_logged():
  def longest(prompts, completions, rewards, number, **columns):
    assert len(prompts) == len(rewards) == len(number) == 16
    return {"longest": max(map(len, completions))}

  learner = clusters.grpo(metric_fns=longest)
  learner.train(clusters.prompts(1))
  assert learner.rl_cluster.logger.get_metric("", "longest", Mode.TRAIN) > 0


def test_a_checkpoint_of_another_reference_is_refused(tmp_path):
  def make(seed):
    return clusters.grpo(
      {"beta": 0.1},
      reference=clusters.model(seed=seed),
      checkpoint_root_directory=str(tmp_path),
    )

  learner = make(1)
  learner.train(clusters.prompts(1))
  learner.close()
  with pytest.raises(ValueError, match="reference"):
    make(2)


def test_evaluation_reports_pass_at_k():
  sampled = {"eval_num_generations": 4, "pass_threshold": 0.5}
  learner = clusters.grpo(sampled, best=BestOptions())
  result = learner.train(clusters.prompts(2), clusters.prompts(2, seed=9))
  logger = learner.rl_cluster.logger
  assert (result.steps, result.ended_by, result.best.step) == (2, "data", 2)
  reward = logger.get_last_metric("", "rewards/score/mean", Mode.EVAL)
  assert result.best.value == reward and result.best.greater_is_better
  progress = LearnerProgress(best=result.best)
  assert LearnerProgress(**json.loads(json.dumps(progress.to_json()))) == progress
  one, four = (logger.get_metric("", f"pass@{k}", Mode.EVAL) for k in (1, 4))
  assert 0 < one <= four <= 1
  assert len(logger.get_metric_history("", "pass@1", Mode.EVAL)) == 2


def test_failed_rewards_are_left_out_and_counted():
  def broken(prompts, completions, **columns):
    values = clusters.even(prompts, completions)
    return [float("nan") if i % 5 == 0 else v for i, v in enumerate(values)]

  learner = clusters.grpo(reward_fns=broken)
  learner.train(clusters.prompts(1))
  logger = learner.rl_cluster.logger
  assert logger.get_metric("", "rewards/failed", Mode.TRAIN) == 4 / 16
  assert np.isfinite(logger.get_metric("actor", "loss", Mode.TRAIN))


def test_an_advantage_that_is_no_number_ends_the_run():
  def huge(rewards, where=None):
    return np.where(where, 1e300, np.nan)

  learner = clusters.grpo({"advantage_estimator": huge})
  with pytest.raises(ValueError, match=r"16 of 16 advantages .*first one is 1e\+300"):
    learner.train(clusters.prompts(1))


def test_weights_that_are_no_numbers_are_not_saved(tmp_path):
  learner = saving(tmp_path, every=1)
  actor = learner.rl_cluster.actor_trainer
  actor._state.tx = optax.scale(-np.inf)
  actor._state.forget_steps()
  with pytest.raises(RuntimeError, match="a weight is not finite after step 1"):
    learner.train(clusters.prompts(1))
  learner.close()
  assert saving(tmp_path).train_steps == 0


def test_nothing_but_failures_is_an_error_with_a_name():
  def broken(prompts, completions, **columns):
    raise KeyError("answer")

  with pytest.raises(ValueError, match="every reward failed"):
    clusters.grpo(reward_fns=broken).train(clusters.prompts(1))


def test_a_prompt_that_is_too_long_is_named():
  data = [{"prompts": [" ".join(["5"] * 9)]}]
  with pytest.raises(ValueError, match="max_prompt_length"):
    clusters.grpo().train(data)


def test_reward_workers_end_although_the_last_checkpoint_is_not_written(
  tmp_path, monkeypatch
):
  def full(manager):
    raise OSError("No space left")

  class Watched(RewardManager):
    is_open = True

    def close(self):
      self.is_open = False

  rewards = Watched(clusters.even)
  learner = clusters.grpo(reward_fns=rewards, checkpoint_root_directory=str(tmp_path))
  monkeypatch.setattr("orbax.checkpoint.CheckpointManager.close", full)
  with pytest.raises(OSError, match="could not be written"):
    learner.close()
  assert not rewards.is_open


def test_no_prompts_is_an_error():
  with pytest.raises(ValueError, match="training data"):
    clusters.grpo().train([])


def test_refusals():
  with pytest.raises(ValueError, match="reference"):
    clusters.grpo({"beta": 0.1})
  with pytest.raises(ValueError, match="temperature"):
    clusters.grpo(rollout={"temperature": 0.0})
  with pytest.raises(ValueError, match="shared_prompt is True"):
    clusters.grpo({"shared_prompt": True}, actor=trainers.tokens_only())
  with pytest.raises(ValueError, match="at least 2"):
    GRPOConfig(num_generations=1)
  with pytest.raises(ValueError, match="needs a critic"):
    PPOLearner(clusters.cluster(), PPOConfig(beta=0.0), clusters.even)


@pytest.mark.parametrize(
  ("learner", "config"),
  [
    (DrGRPOLearner, DrGRPOConfig(num_generations=4, beta=0.0)),
    (RLOOLearner, RLOOConfig(num_generations=4, beta=0.0)),
    (
      DAPOLearner,
      DAPOConfig(num_generations=4, overlong_buffer=OverlongBuffer(tokens=3)),
    ),
  ],
)
def test_variants_train(learner, config, plain_weights):
  made = learner(clusters.cluster(), config, clusters.even)
  assert isinstance(made, GRPOLearner)
  made.train(clusters.prompts(2))
  assert made.train_steps >= 1
  assert not same(plain_weights, weights(made))


def sometimes(prompts, completions, number, **columns):
  """Groups of odd-numbered prompts have equal rewards."""
  values = clusters.even(prompts, completions)
  return [1.0 if n % 2 else v for v, n in zip(values, number)]


def test_dynamic_sampling_fills_the_batch():
  learner = DAPOLearner(
    clusters.cluster(max_steps=2), DAPOConfig(num_generations=4), sometimes
  )
  seen = []
  update = learner._update
  learner._update = lambda example, skip: (seen.append(example), update(example, skip))
  learner.train(clusters.prompts(20))
  assert [e.rows for e in seen] == [16, 16]
  for example in seen:
    groups = np.asarray(example.advantages).reshape(4, 4)
    assert (np.ptp(groups, axis=1) > 0).all()
  refills = learner.rl_cluster.logger.get_metric(
    "", "dynamic_sampling/refills", Mode.TRAIN
  )
  assert refills >= 1


def test_dynamic_sampling_is_bounded():
  config = DAPOConfig(num_generations=4, max_refills=2)
  learner = DAPOLearner(
    clusters.cluster(), config, lambda prompts, completions, **c: [1.0] * len(prompts)
  )
  with pytest.raises(ValueError, match="in 3 batches of prompts no group"):
    learner.train(clusters.prompts(9))


def test_ppo_trains_actor_and_critic():
  cluster = clusters.cluster(critic=True, reference=clusters.model(seed=0))
  learner = PPOLearner(cluster, PPOConfig(beta=0.05, num_iterations=2), clusters.even)
  before = trainers.leaves(cluster.critic_trainer.model)
  learner.train(clusters.prompts(3))
  assert learner.train_steps == cluster.critic_trainer.train_steps == 6
  assert not same(before, trainers.leaves(cluster.critic_trainer.model))
  logger = cluster.logger
  for prefix, name in (
    ("critic", "vf_clipfrac"),
    ("critic", "loss"),
    ("", "rewards/kl"),
  ):
    assert logger.metric_exists(prefix, name, Mode.TRAIN), name


def test_a_reward_model_rewards():
  reward = heads.with_scores(clusters.model(seed=5))
  learner = clusters.grpo(reward=reward, reward_fns=None)
  learner.train(clusters.prompts(1))
  assert learner.rl_cluster.logger.metric_exists("", "rewards/reward_model", Mode.TRAIN)


def test_lora_actor_and_its_reference_share_the_backbone():
  actor = clusters.model(lora_rank=2)
  learner = clusters.grpo({"beta": 0.1}, actor=actor)
  learner.train(clusters.prompts(1))
  assert learner.rl_cluster.reference is None
  assert learner.rl_cluster.logger.get_metric("actor", "kl", Mode.TRAIN) > 0


def test_exact_scoring_gives_the_same_bits_again():
  learner = clusters.grpo({"exact_tile_rows": 4, "num_iterations": 2})
  example = learner._collect(PromptSource(clusters.prompts(1)))
  again = learner._experience.old_logps(example.take(range(4, 8)))
  assert np.array_equal(again, example.old_per_token_logps[4:8])


@pytest.mark.shipped
def test_exact_scoring_makes_the_first_ratio_one():
  """Any clip at all would show: epsilon is 0."""
  learner = clusters.grpo({"exact_tile_rows": 4, "num_iterations": 2, "epsilon": 0.0})
  learner.train(clusters.prompts(1))
  history = learner.rl_cluster.logger.get_metric_history(
    "actor", "pg_clipfrac", "train"
  )
  assert history[0] == 0.0 and history[1] > 0


@scored.has_compared_bits
@pytest.mark.shipped
@pytest.mark.parametrize("axes", [{}, {"dp": 2, "fsdp": 4}], ids=["", "mesh"])
def test_a_batch_invariant_actor_is_not_scored_again(axes, monkeypatch):
  """Its sampler's log-probabilities are those of the policy before the update."""
  actor = clusters.model(batch_invariant=True)
  where = {"role_to_mesh": {Role.ACTOR: mesh_lib.create_mesh(axes)}} if axes else {}
  learner = clusters.grpo({"num_iterations": 2, "epsilon": 0.0}, actor=actor, **where)
  calls = []
  score = learner.rl_cluster.get_old_per_token_logps

  def counted(*args, **options):
    calls.append(args)
    return score(*args, **options)

  monkeypatch.setattr(learner.rl_cluster, "get_old_per_token_logps", counted)
  learner.train(clusters.prompts(2))
  assert len(calls) == 1  # the first batch, which is compared
  history = learner.rl_cluster.logger.get_metric_history
  clipped = history("actor", "pg_clipfrac", "train")
  assert [x > 0 for x in clipped] == [False, True, False, True]
  assert history("actor", "parity/abs_diff", "train")[0] == 0.0


def test_a_batch_invariant_actor_whose_bits_differ_is_scored(monkeypatch, caplog):
  actor = clusters.model(batch_invariant=True)
  learner = clusters.grpo({"num_iterations": 2}, actor=actor)
  score, calls = learner.rl_cluster.get_old_per_token_logps, []

  def shifted(*args, **options):
    calls.append(args)
    return score(*args, **options) + np.float32(1e-3)

  monkeypatch.setattr(learner.rl_cluster, "get_old_per_token_logps", shifted)
  learner.train(clusters.prompts(2))
  assert len(calls) == 2
  assert "have another log-probability in the sampler" in caplog.text


@pytest.mark.parametrize(
  ("actor", "options"),
  [
    ({}, {"rollout": {"top_k": 3}}),
    ({"batch_invariant": False}, {}),
    ({"batch_invariant": True}, {"rollout": {"weights": "int8"}}),
  ],
)
def test_what_no_sampler_scores_exactly(actor, options):
  model = clusters.model(**{"batch_invariant": True, **actor})
  learner = clusters.grpo(actor=model, **options)
  assert not setup.samples_exactly(learner.rl_cluster)


def test_the_first_ratio_is_one_at_any_temperature():
  """The loss and the scores of the rollouts divide by the same temperature."""
  learner = clusters.grpo(
    {"num_iterations": 2, "epsilon": 1e-3}, rollout={"temperature": 0.5}
  )
  learner.train(clusters.prompts(1))
  history = learner.rl_cluster.logger.get_metric_history(
    "actor", "pg_clipfrac", "train"
  )
  assert history[0] == 0.0 and history[1] > 0


def test_rewards_are_compared_each_by_itself(monkeypatch):
  """A reward in thousands leaves nothing of another one, unless they are decoupled."""

  def long(prompts, completions, **columns):
    return [1000.0 * len(text) for text in completions]

  seen = []
  learned = []
  for decoupled in (False, True):
    manager = RewardManager([long, clusters.even], weights=[1.0, 2.0])
    learner = clusters.grpo({"decoupled_rewards": decoupled}, reward_fns=manager)
    rollouts = learner._rollouts(prompt_batch(clusters.prompts(1)[0]))
    seen.append(np.asarray(learner._with_advantages(rollouts).advantages))
    parts, factors = rollouts.reward_parts()
    assert factors == [1.0, 2.0]
    np.testing.assert_allclose(parts[0] + 2 * parts[1], rollouts.scores)
    learner.train(clusters.prompts(1))
    learned.append(weights(learner))
    names = ("rewards/long", "rewards/even")
    logger = learner.rl_cluster.logger
    assert all(logger.metric_exists("", name, Mode.TRAIN) for name in names)
    shape = rollouts.scores.shape
    want = advantages.decoupled(advantages.group_normalized, parts, factors)
    if decoupled:
      np.testing.assert_allclose(seen[-1].reshape(shape), want, rtol=1e-5)
  assert not np.allclose(*seen, atol=1e-2) and not same(*learned)
