"""Learning, within bands: every algorithm takes a half-taught model further."""

import numpy as np
import pytest

from tests.rl import learning


@pytest.fixture(scope="module")
def half_taught(tmp_path_factory):
  return learning.half_taught(tmp_path_factory.mktemp("quickstart"))


@pytest.mark.slow
@pytest.mark.parametrize("name", learning.ALGORITHMS)
def test_rewards_rise(half_taught, name):
  curve = learning.rewards(name, half_taught)
  assert 0.3 < np.mean(curve[:5]) < 0.7
  assert np.mean(curve[-10:]) > (0.9 if name == "grpo" else 0.85)
