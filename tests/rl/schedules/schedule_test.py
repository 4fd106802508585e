"""Sampling ahead of the updates: its bytes, checkpoints, ends and faults."""

import shutil
import threading
import time

import jax
import numpy as np
import pytest
from flax import nnx

from tests.rl import clusters
from tests.rl.env import toy_envs
from tests.sft import trainers
from tunix.rl.env.config import EpisodeConfig
from tunix.rl.grpo.dapo_learner import DAPOConfig, DAPOLearner
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.ppo.ppo_learner import PPOConfig, PPOLearner
from tunix.sft.metrics_logger import Mode
from tunix.sft.peft_trainer import CheckpointOptions

STEPS, KILLED = 5, 4
CASES = [
  (1, None),
  (2, toy_envs.Echo),
  pytest.param(1, toy_envs.Echo, marks=pytest.mark.slow),
  pytest.param(2, None, marks=pytest.mark.slow),
]


class Watched(GRPOLearner):
  """Keeps the rollouts of every step."""

  def _rollouts(self, batch, mode=Mode.TRAIN):
    out = super()._rollouts(batch, mode)
    self.__dict__.setdefault("seen", []).append(out)
    return out


def learner(lag, folder=None, *, env=None, kind=Watched, algorithm=None, **options):
  settings = {"num_generations": 2, "beta": 0.0} | (algorithm or {})
  if lag:
    options |= {"schedule": "lagged", "lag": lag}
  if (own := options.pop("own_lag", None)) is not None:  # of another schedule
    options["lag"] = own
  if folder is not None:
    options["checkpoint_root_directory"] = str(folder)
    options["checkpointing_options"] = CheckpointOptions(
      save_every_n_steps=1, max_to_keep=None
    )
  options.setdefault("rollout", {"max_tokens_to_generate": 4, "max_prompt_length": 8})
  rewards = options.pop("reward_fns", clusters.even if env is None else None)
  more = {"metric_fns": options.pop("metric_fns", None)}
  if env is not None:
    more |= {"env": env, "episodes": EpisodeConfig(max_turns=3, max_tokens=24)}
  config = options.pop("config", GRPOConfig)(**settings)
  return kind(clusters.cluster(**options), config, rewards, **more)


def weights(learner):
  state = nnx.state(learner.rl_cluster.actor_trainer.model)
  return [np.asarray(x) for x in jax.tree.leaves(state)]


def assert_same(a, b):
  for x, y in zip(a, b, strict=True):
    np.testing.assert_array_equal(x, y)


def trained(learner):
  """The rollouts of the steps, without those of evaluations."""
  return [x for x in learner.seen if len(x.text) == 4]


def sampler_threads():
  return [t for t in threading.enumerate() if t.name == "tunix-rollouts"]


def data(steps=STEPS):
  return clusters.prompts(steps, 2)


@pytest.mark.parametrize(("lag", "env"), CASES)
def test_a_run_killed_after_any_step_ends_with_the_same_bytes(tmp_path, lag, env):
  whole = learner(lag, tmp_path / "whole", env=env)
  whole.train(data(KILLED), data(1))
  whole.close()
  expected = weights(whole)
  for step in range(1, KILLED):
    folder = tmp_path / f"from_{step}"
    shutil.copytree(tmp_path / "whole", folder)
    for later in range(step + 1, KILLED + 1):
      shutil.rmtree(folder / str(later))
    resumed = learner(lag, folder, env=env)
    assert resumed.train_steps == step
    resumed.train(data(KILLED), data(1))
    assert_same(weights(resumed), expected)
    # The first of them come from the checkpoint, and hold what was sampled.
    for a, b in zip(trained(resumed), trained(whole)[step:], strict=True):
      assert a.text == b.text and a.batch == b.batch
      assert_same([a.versions, a.rollout_logps], [b.versions, b.rollout_logps])
      assert [e.messages for e in a.episodes] == [e.messages for e in b.episodes]
    resumed.close()
  assert not sampler_threads()


def test_the_weights_of_a_batch_are_those_of_the_lag():
  ours = learner(2)
  with trainers.compilations() as names:
    ours.train(data())
  assert names.count("jit(decode)") <= 1, names  # weights of updates, as the first ones
  versions = [int(x.versions[x.completion_mask].max()) for x in ours.seen]
  assert versions == [0, 0, 0, 1, 2]
  assert [x.batch.number for x in ours.seen] == [1, 2, 3, 4, 5]
  assert ours.rl_cluster.rollout.version == ours.rl_cluster.version
  assert ours.rl_cluster.version.step == 5
  history = ours.metrics_logger
  assert history.get_metric_history("", "staleness/max", Mode.TRAIN)[-1] == 2


def test_a_lag_corrects_the_loss_unless_the_user_chose():
  assert learner(1).algo_config.rollout_correction.kind == "truncate"
  assert learner(0).algo_config.rollout_correction is None


def test_a_slow_learner_and_slow_rewards_change_no_byte():
  def late(prompts, completions, **columns):
    time.sleep(0.1)
    return clusters.even(prompts, completions)

  quick, slow = learner(1), learner(1, reward_fns=late)
  quick.train(data(3), data(1))
  slow.train(data(3))
  assert_same(weights(quick), weights(slow))


def test_ppo_samples_ahead():
  options = {"kind": PPOLearner, "config": PPOConfig, "critic": True}
  ours = learner(1, **options)
  ours.train(data(3))
  assert ours.train_steps == 3


def test_a_failure_of_a_batch_is_raised_in_its_step_and_can_be_tried_again():
  calls = []

  def fails(prompts, completions, rewards, **columns):
    calls.append(threading.current_thread().name)
    if len(calls) == 3:
      raise SystemExit("the sandbox is gone")
    return {"one": 1.0}

  expected = learner(1)
  expected.train(data())
  ours = learner(1, metric_fns=fails)
  with pytest.raises(SystemExit, match="the sandbox is gone"):
    ours.train(data())
  assert ours.train_steps == 2  # batches 0 and 1 are trained, batch 2 has failed
  assert set(calls) == {"tunix-rollouts"}
  ours.train(data())
  assert_same(weights(ours), weights(expected))


def test_a_batch_that_hangs_ends_the_run_with_its_name():
  released = threading.Event()

  def hangs(prompts, completions, **columns):
    released.wait(20)
    return clusters.even(prompts, completions)

  ours = learner(1, reward_fns=hangs, rollout_timeout_s=0.5)
  with pytest.raises(TimeoutError, match="batch 0 of the rollouts is not finished"):
    ours.train(data())
  released.set()
  ours.close()
  for thread in sampler_threads():  # `close` waits only as long as a batch may take
    thread.join(60)
  assert not sampler_threads()


def test_the_end_of_steps_leaves_no_thread(tmp_path):
  ours = learner(1, tmp_path, max_steps=2)
  assert ours.train(data()).ended_by == "max_steps"
  ours.close()
  assert not sampler_threads()


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"kind": DAPOLearner, "config": DAPOConfig}, "dynamic_sampling is True"),
    ({"rollout_engine": "vllm"}, "rollout_engine is 'vllm'"),
  ],
)
def test_what_cannot_sample_ahead_is_refused(options, message):
  with pytest.raises(ValueError, match=message):
    learner(1, **options)


def test_another_lag_does_not_resume(tmp_path):
  first = learner(1, tmp_path, max_steps=1)
  first.train(data())
  first.close()
  with pytest.raises(ValueError, match="run with lag 1, and this run has 2"):
    learner(2, tmp_path)
