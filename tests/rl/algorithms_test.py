"""The table of algorithms: every name has a config that its learner runs."""

import pytest

from tunix.rl import algorithms


@pytest.mark.parametrize("name", algorithms.ALGORITHMS)
def test_a_config_leads_to_its_learner(name):
  algorithm = algorithms.ALGORITHMS[name]
  assert algorithms.learner_of(algorithm.config()) is algorithm.learner
  group = algorithms.configs(uses_critic=algorithm.learner.uses_critic)
  assert group[name] is algorithm.config


def test_only_ppo_has_a_critic():
  assert list(algorithms.configs(uses_critic=True)) == ["ppo"]
  assert next(iter(algorithms.configs(uses_critic=False))) == "grpo"  # the default


@pytest.mark.parametrize(
  ("name", "settings", "wastes"),
  [
    ("grpo", {}, True),
    ("rloo", {}, True),
    ("grpo", {"advantage_estimator": "batch_normalized"}, False),
    ("grpo", {"advantage_estimator": lambda rewards, where: rewards}, False),
    ("grpo", {"decoupled_rewards": True}, False),
    ("dapo", {}, False),
    ("dapo", {"dynamic_sampling": False}, True),
    ("ppo", {"num_generations": 2}, False),
  ],
)
def test_groups_with_equal_rewards_are_wasted_or_not(name, settings, wastes):
  config = algorithms.ALGORITHMS[name].config(**settings)
  assert config.wastes_equal_groups == wastes
