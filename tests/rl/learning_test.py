"""The algorithms learn: bands on mean rewards, from a model that half knows its sums.

docs/performance.md has the curves: `python -m tests.rl.learning --plot FILE`.
"""

import numpy as np
import pytest

from tests.rl import learning


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  return learning.half_taught(tmp_path_factory.mktemp("half"))


@pytest.mark.slow
@pytest.mark.parametrize("name", learning.ALGORITHMS)
def test_rewards_rise(name, model):
  curve = learning.rewards(name, model)
  means = [float(np.mean(curve[i : i + 10])) for i in range(0, len(curve), 10)]
  assert 0.45 < means[0] < 0.7, means
  assert max(means) > learning.GOALS[name], means
  assert means[-1] > learning.GOALS[name] - 0.05, means  # and it holds
