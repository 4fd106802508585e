import functools
import re

import jax
import numpy as np
import pytest
from flax import nnx

from tests.rl import clusters
from tests.rl.env import toy_envs
from tunix.rl.common import token_rewards
from tunix.rl.env.config import EpisodeConfig
from tunix.rl.experience import samples
from tunix.rl.grpo.rloo_learner import RLOOConfig, RLOOLearner
from tunix.rl.pipeline import prompt_batch
from tunix.rl.ppo.ppo_learner import PPOConfig, PPOLearner

ROLLOUT = {"max_tokens_to_generate": 4, "max_prompt_length": 8}


class Watching:
  """Mixed into a learner: keeps the rollouts of every step."""

  def _rollouts(self, batch, *args, **options):
    out = super()._rollouts(batch, *args, **options)
    self.__dict__.setdefault("seen", []).append(out)
    return out


class Watched(Watching, clusters.GRPOLearner):
  pass


def learner(env, limits=None, *, algorithm=None, **options):
  episodes = EpisodeConfig(**{"max_turns": 4, "max_tokens": 24, **(limits or {})})
  options.setdefault("rollout", ROLLOUT)
  return Watched(
    clusters.cluster(**options),
    clusters.GRPOConfig(**{"num_generations": 4, "beta": 0.0, **(algorithm or {})}),
    env=env,
    episodes=episodes,
  )


def weights(learner):
  return jax.tree.leaves(nnx.state(learner.rl_cluster.actor_trainer.model))


def test_one_turn_equals_completions_to_the_bit():
  data = clusters.prompts(2)
  direct = clusters.grpo(rollout=ROLLOUT)
  direct.train(data)
  ours = learner(toy_envs.OneAnswer, {"max_turns": 1})
  ours.train(data)
  assert {rollouts.completion_mask.shape[1] for rollouts in ours.seen} == {4}
  for a, b in zip(weights(direct), weights(ours), strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def trained():
  ours = learner(toy_envs.Echo, {"max_turns": 3})
  ours.train(clusters.prompts(1))
  return ours


def test_a_row_has_what_was_drawn_and_what_was_observed(trained):
  (rollouts,) = trained.seen
  assert len(rollouts.episodes) == 16 and rollouts.episode_rows == 1
  for row, episode in enumerate(rollouts.episodes):
    assert len(episode.turns) == 3 and episode.finish_reason == "done"
    ids, drawn = [], []
    for number, turn in enumerate(episode.turns):
      ids += turn.action
      drawn += [True] * len(turn.action)
      if number < 2:
        ids += [turn.action[0], row // 4]  # the column "number" of the data
        drawn += [False, False]
    count = len(ids)
    assert rollouts.completion_ids[row, :count].tolist() == ids
    # Of 24 tokens at most; the longest row has at most 16, a power of two.
    mask = [*drawn, *[False] * (rollouts.completion_mask.shape[1] - count)]
    assert rollouts.completion_mask[row].tolist() == mask
    rewards = rollouts.turn_rewards[row]
    assert (
      rewards.sum() == episode.reward == sum(t.action[0] % 2 for t in episode.turns)
    )
    ends = np.flatnonzero(rewards)
    assert set(ends) <= set(np.flatnonzero(rollouts.completion_mask[row]))


def test_rows_are_as_wide_as_the_longest_of_a_batch(trained):
  whole = learner(toy_envs.Echo, {"max_turns": 3}, bucketed_lengths=False)
  whole.train(clusters.prompts(1))
  shapes = [x.seen[0].completion_ids.shape for x in (trained, whole)]
  assert shapes == [(16, 16), (16, 24)]  # a power of two; max_tokens
  for a, b in zip(weights(trained), weights(whole), strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5)
  # Bits that depend on a row alone need rows of one width.
  exact = learner(toy_envs.Echo, algorithm={"exact_tile_rows": 4})
  rollouts = exact._rollouts(prompt_batch(clusters.prompts(1)[0]))
  assert rollouts.completion_ids.shape == (16, 24)


def test_log_probs_are_those_of_the_trainer(trained):
  # With a learning rate of 1e-3 and Adam the weights have moved: score with new ones.
  fresh = learner(toy_envs.Echo, {"max_turns": 3})
  batch = prompt_batch(clusters.prompts(1)[0])
  rollouts = fresh._rollouts(batch)
  scored = fresh.rl_cluster.get_old_per_token_logps(rollouts)
  mask = rollouts.completion_mask
  np.testing.assert_allclose(scored[mask], rollouts.rollout_logps[mask], atol=2e-6)
  assert not rollouts.rollout_logps[~mask].any() and not scored[~mask].any()


@pytest.mark.parametrize(
  "engine, order", [("vanilla", "turns"), ("vanilla", "arrival"), ("padded", "turns")]
)
def test_tokens_depend_on_neither_order_nor_form_of_observations(engine, order):
  ours = learner(toy_envs.Ids, {"order": order}, rollout_engine=engine)
  rollouts = ours._rollouts(prompt_batch(clusters.prompts(1)[0]))
  plain = learner(toy_envs.Echo)._rollouts(prompt_batch(clusters.prompts(1)[0]))
  first = [episode.turns[0].action for episode in rollouts.episodes]
  assert first == [episode.turns[0].action for episode in plain.episodes]
  if engine == "vanilla":  # a call of the padded sampler numbers its rows by itself
    assert rollouts.completion_ids.tolist() == plain.completion_ids.tolist()


def test_rewritten_history_gives_more_rows():
  make = functools.partial(toy_envs.Forgetful, turns=3)
  ours = learner(lambda prompt: make(prompt))
  ours.train(clusters.prompts(1))
  (rollouts,) = ours.seen
  assert rollouts.episode_rows == 4  # the power of two above 3
  for number, episode in enumerate(rollouts.episodes):
    rows = slice(4 * number, 4 * number + 4)
    drawn = rollouts.completion_mask[rows].sum(1).tolist()
    assert drawn == [*[len(turn.action) for turn in episode.turns], 0]
  rewards = token_rewards(rollouts).reshape(16, 4, -1).sum(2)
  turns = np.array([[t.reward for t in e.turns] for e in rollouts.episodes])
  np.testing.assert_allclose(rewards[:, 0], turns.sum(1))
  np.testing.assert_allclose(rewards[:, 2], turns[:, 2])


def test_the_penalty_of_rloo_is_that_of_all_rows():
  actor, reference = clusters.model(), clusters.model(1)
  ours = RLOOLearner(
    clusters.cluster(actor, reference=reference, rollout=ROLLOUT),
    RLOOConfig(num_generations=2, beta=0.1),
    env=toy_envs.Forgetful,
    episodes=EpisodeConfig(max_turns=3, max_tokens=8),
  )
  ours.train([{"prompts": ["3 4", "5"]}])
  assert ours.train_steps == 1


HOW = {
  "raises": "the database is away",
  "exits": "SystemExit",
  "hangs": "no answer within",
  "wrong type": "expected a StepResult",
  "nan": "expected a number up to",
  "bad stop": "a stop condition",
  "no prompt": "an observation is 17",
}


def test_a_hostile_environment_costs_its_episode_only():
  names = iter([*HOW, "floods", *["none"] * 8])
  make = lambda prompt: toy_envs.Hostile(prompt, next(names))
  ours = learner(make, {"timeout_s": 0.5, "workers": 1})
  rollouts = ours._rollouts(prompt_batch(clusters.prompts(1)[0]))
  by_how = dict(zip([*HOW, "floods"], rollouts.episodes))
  for how, message in HOW.items():
    assert by_how[how].finish_reason == "failed"
    assert message in by_how[how].failure
  assert by_how["floods"].finish_reason in ("observation", "tokens")
  assert all(e.failure is None for e in rollouts.episodes[8:])
  total = rollouts.rewards.total
  assert np.isnan(total[: len(HOW)]).all() and np.isfinite(total[len(HOW) :]).all()
  example = ours._example(rollouts, np.zeros(16))
  assert not example.completion_mask[: len(HOW)].any()
  assert example.completion_mask[8:].any(1).all()


def test_wrong_types_cost_their_episodes_only():
  how = [*toy_envs.WRONG, "no tools", "friendly"]
  ours = learner(toy_envs.Wrong, algorithm={"num_generations": 2})
  batch = prompt_batch({"prompts": ["3 4"] * len(how), "how": how})
  rollouts = ours._rollouts(batch)
  for number, name in enumerate(how):
    for episode in rollouts.episodes[2 * number : 2 * number + 2]:
      if name in toy_envs.WRONG:
        assert toy_envs.WRONG[name][1] in episode.failure, (name, episode.failure)
      else:
        assert episode.failure is None and episode.reward == 1.0
        assert (
          len(episode.turns[0].action) == rollouts.completion_mask[2 * number].sum()
        )


def test_a_group_that_fails():
  class Nothing:
    def __init__(self, envs, reward=(0.0, {})):
      self._envs, self._reward = envs, reward

    def make_envs(self):
      return self._envs

    def compute_group_rewards(self, trajectory_group, env_group):
      return [self._reward] * len(trajectory_group)

  def make(prompt, how):
    fine = [toy_envs.OneAnswer(prompt) for _ in range(2)]
    return {
      "none": lambda: Nothing([None, None]),
      "too few": lambda: Nothing(fine[:1]),
      "nan": lambda: Nothing(fine, (float("nan"), {})),
      "large": lambda: Nothing(fine, (10**400, {})),
      "fine": lambda: Nothing(fine),
    }[how]()

  how = ["none", "too few", "nan", "large", "fine"]
  ours = learner(make, algorithm={"num_generations": 2})
  rollouts = ours._rollouts(prompt_batch({"prompts": ["3"] * 5, "how": how}))
  said = [episode.failure or "" for episode in rollouts.episodes[::2]]
  wanted = [
    "NoneType",
    "make_envs gave 1",
    "is nan; expected a n",
    "a number up to",
    "",
  ]
  assert all(part in text for part, text in zip(wanted, said)), said
  assert np.isnan(rollouts.rewards.total).tolist() == [True] * 8 + [False] * 2


def test_rewards_of_a_group():
  toy_envs.Pairs.closed = 0
  ours = learner(toy_envs.Pairs)
  ours.train(clusters.prompts(1))
  (rollouts,) = ours.seen
  assert toy_envs.Pairs.closed == 4
  firsts = np.array([e.turns[0].action[0] for e in rollouts.episodes]).reshape(4, 4)
  wanted = firsts % 2 + 10.0 * (firsts == firsts.max(1, keepdims=True))
  np.testing.assert_array_equal(rollouts.totals, wanted)


def test_samples_show_turns_with_what_the_environment_gave(trained):
  (rollouts,) = trained.seen
  (group, *_) = samples.groups_of(rollouts, np.zeros(16), most=1)
  shown, episode = group["completions"][0], rollouts.episodes[0]
  assert shown["text"].count("[assistant") == 3 and "[user]" in shown["text"]
  assert [turn["reward"] for turn in shown["turns"]] == [
    turn.reward for turn in episode.turns
  ]
  assert [turn["metrics"] for turn in shown["turns"]] == [
    {"left": n} for n in (2, 1, 0)
  ]
  assert shown["turns"][0]["logs"] == {"said": episode.turns[0].action[0]}
  assert episode.transitions[0].ac.tokens == list(episode.turns[0].action)


def test_limits_end_an_episode():
  make = lambda prompt: toy_envs.Echo(prompt, turns=9)
  turns = learner(make, {"max_turns": 2})._rollouts(prompt_batch({"prompts": ["3 4"]}))
  assert set(turns.finish_reasons) == {"turns"} and turns.truncated.all()
  tokens = learner(make, {"max_turns": 9, "max_tokens": 8})
  for prompt in ("3 4 5 6 7 8 9 3", "3"):
    rollouts = tokens._rollouts(prompt_batch({"prompts": [prompt]}))
    assert set(rollouts.finish_reasons) == {"tokens"}
    assert rollouts.completion_mask.shape[1] == 8
    assert rollouts.lengths.max() == 6  # 4, an observation of 2, and 2
  small = learner(make, {"max_observation_tokens": 1})
  rollouts = small._rollouts(prompt_batch({"prompts": ["3 4"]}))
  assert set(rollouts.finish_reasons) == {"observation"}


def test_ppo_rewards_each_action():
  cluster = clusters.cluster(critic=True, rollout=ROLLOUT)
  ours = PPOLearner(
    cluster,
    PPOConfig(num_generations=1, beta=0.0),
    env=toy_envs.Echo,
    episodes=EpisodeConfig(max_turns=4, max_tokens=24),
  )
  ours.train(clusters.prompts(2))
  assert ours.train_steps == 2


def test_refuses_what_cannot_run():
  with pytest.raises(TypeError, match="expected a function"):
    learner(3)
  with pytest.raises(ValueError, match="rollout_micro_batch_size is 2, but all"):
    learner(toy_envs.Echo, rollout_micro_batch_size=2)
  with pytest.raises(ValueError, match="env needs 'answer'"):
    learner(lambda prompt, answer: None).train(clusters.prompts(1))
  with pytest.raises(ValueError, match="the column 'environments'"):
    learner(toy_envs.Echo).train([{"prompts": ["3"], "environments": [1]}])
  with pytest.raises(ValueError, match="order is 'fast'"):
    EpisodeConfig(order="fast")


@pytest.mark.parametrize("order", ["turns", "arrival"])
def test_players_of_a_game_take_turns(order):
  ours = learner(toy_envs.Game, {"order": order, "timeout_s": 20})
  rollouts = ours._rollouts(prompt_batch({"prompts": ["3", "4"]}))
  for first, second in zip(rollouts.episodes[::2], rollouts.episodes[1::2]):
    a, b = ([turn.action[0] for turn in e.turns] for e in (first, second))
    # Each player's next prompt has what the other one said last.
    assert first.turns[1].prompt[-1] == b[0]
    assert second.turns[0].prompt[-1] == a[0] and second.turns[1].prompt[-1] == a[1]
    assert (first.reward, second.reward) == (0.0, 2.0)


def test_a_player_that_fails_frees_those_who_wait_for_it():
  make = functools.partial(toy_envs.Game, fails=True)
  rollouts = learner(make)._rollouts(prompt_batch({"prompts": ["3"]}))
  assert [e.failure is None for e in rollouts.episodes] == [False, False, True, True]
  assert "the player left" in rollouts.episodes[0].failure
  assert "waits for another episode" in rollouts.episodes[1].failure


VIOLENT = {
  "dies": "ended with exit code",
  "killed": "ended by SIGKILL",
  "forks": "no answer within",
  "eats memory": "MemoryError",
  "hangs": "no answer within",
  "raises": "the database is away",
}


def test_processes_of_environments_are_killed_and_their_episodes_fail():
  limits = {"isolation": "process", "timeout_s": 3, "memory_bytes": 1 << 30}
  algorithm = {"num_generations": 2}
  ours = learner(toy_envs.Violent, limits, algorithm=algorithm)
  how = [*VIOLENT, "none"]
  batch = prompt_batch({"prompts": ["3"] * len(how), "how": how})
  rollouts = ours._rollouts(batch)
  for number, name in enumerate(how):
    for episode in rollouts.episodes[2 * number : 2 * number + 2]:
      if name == "none":
        assert episode.failure is None and len(episode.turns) == 3
      else:
        assert re.search(VIOLENT[name], episode.failure), (name, episode.failure)
  ours.close()
  with pytest.raises(TypeError, match="cannot be sent to a process"):
    learner(lambda prompt: None, {"isolation": "process"})
  with pytest.raises(ValueError, match="only a process has a limit"):
    EpisodeConfig(memory_bytes=100)
