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
