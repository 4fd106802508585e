"""Routes of experts that are recorded while sampling, and replayed in RL training."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from tests import toys
from tests.rl import clusters
from tests.rl.env import toy_envs
from tests.rl.schedules import schedule_test
from tests.rl.schedules.schedule_test import assert_same, data, trained, weights
from tunix.models.transformer.config import MoEConfig
from tunix.models.transformer.experts import route_records
from tunix.rl.experience import rollout_codec
from tunix.sft.metrics_logger import Mode

# Experts with close scores and large outputs: bfloat16 chooses otherwise for a few
# tokens, and this changes their log-probabilities.
MIXTURE = {"num_experts": 16, "experts_per_token": 2, "hidden_dim": 16, "scale": 32.0}
REPLAY = {"max_tokens_to_generate": 4, "max_prompt_length": 8, "replay_routes": True}


def actor(dtype="float32", **changes):
  return toys.model(moe=MoEConfig(**MIXTURE), dtype=dtype, **changes)


def history(learner, name):
  return learner.metrics_logger.get_metric_history("actor", name, Mode.TRAIN)


def one_step(replays, **options):
  rollout = {**REPLAY, "max_tokens_to_generate": 16, "replay_routes": replays}
  learner = schedule_test.learner(
    0, actor=actor("bfloat16"), rollout=rollout, **options
  )
  learner.train(clusters.prompts(1, size=8))
  return learner


@pytest.fixture(scope="module")
def replayed():
  return one_step(True)


def test_replay_makes_training_equal_to_sampling(replayed):
  plain = one_step(False)
  (ours,), (theirs,) = replayed.seen, plain.seen
  np.testing.assert_array_equal(ours.completion_ids, theirs.completion_ids)
  np.testing.assert_array_equal(ours.rollout_logps, theirs.rollout_logps)
  assert theirs.completion_routes is None
  assert 0 < history(replayed, "router/replaced")[0] < 0.1
  assert history(replayed, "parity/abs_diff") < 0.6 * history(plain, "parity/abs_diff")
  assert history(replayed, "parity/kl") < 0.1 * history(plain, "parity/kl")
  with pytest.raises(ValueError, match="router/replaced' was not logged"):
    history(plain, "router/replaced")


def test_the_actor_scores_with_the_recorded_experts_and_a_reference_with_its_own(
  replayed,
):
  (rollouts,) = replayed.seen
  form = route_records.form_of(replayed.rl_cluster.actor)
  assert rollouts.prompt_routes.shape == (*rollouts.prompt_ids.shape, *form.shape)
  counted = rollouts.completion_routes.any((-1, -2)).sum(1)
  np.testing.assert_array_equal(counted, rollouts.completion_mask.sum(1) - 1)
  cluster = clusters.cluster(actor(), reference=actor(), rollout=REPLAY)
  other = {"completion_routes": None, "prompt_routes": None}
  # The experts of another row, so that a replay shows.
  turned = {x: np.roll(getattr(rollouts, x), 1, axis=0) for x in other}
  (own, ref), (replays, again) = (
    (cluster.get_old_per_token_logps(rows), cluster.get_ref_per_token_logps(rows))
    for rows in (dataclasses.replace(rollouts, **x) for x in (other, turned))
  )
  np.testing.assert_array_equal(ref, again)
  np.testing.assert_allclose(own, ref, atol=1e-6)
  assert np.abs(own - replays).max() > 1e-3


@pytest.mark.parametrize(
  "lag, env",
  [(1, None), pytest.param(2, toy_envs.Echo, marks=pytest.mark.slow)],
)
def test_a_killed_run_ends_with_the_same_bytes(tmp_path, lag, env):
  rollout = REPLAY | {"center_scores": 3}
  made = lambda folder: schedule_test.learner(
    lag, folder, env=env, actor=actor(num_layers=1), rollout=rollout
  )
  whole = made(tmp_path / "whole")
  whole.train(data(3))
  expected = weights(whole)
  whole.close()
  shutil.copytree(tmp_path / "whole", tmp_path / "cut")
  for step in (2, 3):
    for folder in (tmp_path / "cut").glob(f"*{step}"):
      shutil.rmtree(folder)
  resumed = made(tmp_path / "cut")
  assert resumed.train_steps == 1
  resumed.train(data(3))
  assert_same(weights(resumed), expected)
  for a, b in zip(trained(resumed), trained(whole)[1:], strict=True):
    np.testing.assert_array_equal(a.completion_routes, b.completion_routes)
    np.testing.assert_array_equal(a.prompt_routes, b.prompt_routes)
    np.testing.assert_array_equal(a.head_probs, b.head_probs)
    assert a.head_probs[a.completion_mask].any(1).all()
  assert 0 < history(resumed, "score_centering/head")[0] < 1
  resumed.close()


def test_rows_of_environments_have_the_routes_of_all_turns():
  learner = schedule_test.learner(0, env=toy_envs.Echo, actor=actor(), rollout=REPLAY)
  learner.train(clusters.prompts(1, size=2))
  (rollouts,) = trained(learner)
  # Also observations, which the model read, and the ends of actions before them.
  for row, episode in enumerate(rollouts.episodes):
    (whole,) = episode.rows()
    routes = rollouts.completion_routes[row]
    assert routes[: len(whole.ids) - 1].all() and not routes[len(whole.ids) - 1 :].any()
    assert len(episode.turns) > 1
  assert history(learner, "router/replaced")[0] == 0
  assert history(learner, "parity/abs_diff")[0] < 1e-5
  saved = json.loads(json.dumps(rollout_codec.to_json(rollouts)))
  again = rollout_codec.from_json(saved)
  np.testing.assert_array_equal(again.completion_routes, rollouts.completion_routes)
  assert again.completion_routes.dtype == np.uint8
  assert again.episodes[0].turns[0].tokens.routes is None


@pytest.mark.slow
def test_a_greedy_run_replays_routes():
  learner = schedule_test.learner(
    0, own_lag=1, schedule="greedy", actor=actor(), rollout=REPLAY
  )
  learner.train(data(3))
  learner.close()
  assert all(x.completion_routes.any() for x in trained(learner))
  assert history(learner, "parity/abs_diff")[0] < 1e-5


@pytest.mark.parametrize("options", [{"exact_tile_rows": 2}, {"num_iterations": 2}])
def test_exact_scores_and_several_updates_replay(options):
  rows = {"shared_prompt": False} if "num_iterations" in options else {}
  learner = schedule_test.learner(
    0, actor=actor(num_layers=1), rollout=REPLAY, algorithm=options | rows
  )
  learner.train(clusters.prompts(1, size=2))
  assert history(learner, "parity/abs_diff")[0] < 1e-5


def test_what_has_no_routes_is_refused():
  with pytest.raises(ValueError, match="replay_routes is True and the actor is Llama3"):
    clusters.grpo(rollout=REPLAY)
  with pytest.raises(ValueError, match="'vllm' and replay_routes is True"):
    clusters.config(rollout=REPLAY, rollout_engine="vllm")
  learner = clusters.grpo(actor=actor(num_layers=1), rollout=REPLAY)
  engine = learner.rl_cluster.rollout
  generate = engine.generate
  engine.generate = lambda *args, **options: dataclasses.replace(
    generate(*args, **options), routes=None
  )
  with pytest.raises(ValueError, match="VanillaRollout gave no routes"):
    learner.train(clusters.prompts(1, size=2))


def test_the_padded_sampler_replays_too():
  learner = schedule_test.learner(
    0, actor=actor(num_layers=1), rollout=REPLAY, rollout_engine="padded"
  )
  learner.train(clusters.prompts(1, size=2))
  (rollouts,) = trained(learner)
  assert rollouts.completion_routes.any()
  assert history(learner, "parity/abs_diff")[0] < 1e-5
