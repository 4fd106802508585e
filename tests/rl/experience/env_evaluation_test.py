"""Evaluation in environments while a trainer learns from given data."""

import numpy as np
import pytest

from tests import toys
from tests.rl import clusters
from tests.rl.env import toy_envs
from tests.sft import trainers
from tunix.rl.env.config import EpisodeConfig
from tunix.rl.experience.env_evaluation import EnvEvaluation
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

ROWS = [{"prompts": f"{n} {n + 1}", "number": n} for n in range(2, 7)]


def evaluation(make=toy_envs.Echo, episodes=None, rows=ROWS, **options):
  own = {"max_prompt_length": 8, "max_tokens_to_generate": 3}
  sampling = {n: options.pop(n) for n in ("seed", "temperature") if n in options}
  config = RolloutConfig(**own, **sampling)
  limits = EpisodeConfig(max_tokens=24, **(episodes or {}))
  options = {"num_generations": 2, "batch_size": 3, **options}
  return EnvEvaluation(make, rows, clusters.Words(), config, limits, **options)


@pytest.fixture(scope="module")
def model():
  return clusters.model()


def test_the_metrics_are_those_of_an_evaluation_with_environments(model):
  evaluate = evaluation()
  found = evaluate(model)
  assert found == evaluate(model)  # the same draws in each evaluation
  names = {"rewards/score/mean", "rewards/failed", "pass@1", "pass@2", "env/left"}
  assert names | {"episodes/turns", "episodes/finish/done"} <= found.keys()
  assert found["episodes/turns"] == 3 and found["pass@1"] <= found["pass@2"]
  failed = evaluation(toy_envs.Hostile, rows=[{"prompts": "2", "how": "raises"}])(model)
  assert failed["rewards/failed"] == 1.0 and "pass@1" not in failed


@pytest.mark.long
@pytest.mark.parametrize(
  "changes",
  [
    {"make": toy_envs.OneAnswer},
    {"rows": ROWS[1:]},
    {"episodes": {"max_turns": 2}},
    {"num_generations": 1},
    {"pass_threshold": 3.0},
    {"seed": 1},
    {"temperature": 0.0},
  ],
  ids=lambda changes: next(iter(changes)),
)
def test_each_option_changes_the_metrics(changes, model):
  assert evaluation(**changes)(model) != evaluation()(model)


@pytest.mark.parametrize(("turns", "tokens"), [(1, 8 + 3), (2, 8 + 24)])
def test_an_episode_of_one_turn_reserves_the_tokens_of_one_answer(
  turns, tokens, model, monkeypatch
):
  limits, client = [], VanillaRollout.sampling_client

  def noted(self, *args, limit, **sizes):
    limits.append(limit)
    return client(self, *args, limit=limit, **sizes)

  monkeypatch.setattr(VanillaRollout, "sampling_client", noted)
  evaluation(toy_envs.OneAnswer, episodes={"max_turns": turns}, rows=ROWS[:1])(model)
  assert limits == [tokens]


def test_training_does_not_notice_it():
  def run(evaluate):
    trainer = trainers.trainer(
      clusters.model(), max_steps=2, eval_every_n_steps=1
    ).with_evaluation(evaluate)
    trainer.train([toys.batch(seed) for seed in range(2)])
    return trainer

  plain, watched = run(None), run(evaluation())
  assert trainers.equal(trainers.leaves(plain.model), trainers.leaves(watched.model))
  rewards = trainers.history(watched, "rewards/score/mean", "eval")
  assert len(rewards) == 3  # before the first step, and after each
  assert np.isfinite(rewards).all()
  assert not plain.metrics_logger.metric_exists("", "rewards/score/mean", "eval")


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"rows": []}, "rows is empty"),
    ({"num_generations": 0}, "num_generations is 0"),
    ({"batch_size": 0}, "batch_size is 0"),
  ],
)
def test_what_cannot_be_evaluated_is_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    evaluation(**changes)
