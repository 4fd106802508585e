"""Preference training learns a style, from chance to above 0.9 on held-out pairs.

`python -m tests.sft.dpo.learning` prints all figures.
"""

import pytest

from tests.sft.dpo import learning

# Mean (log pi - log pi_0)^2 / 2 of held-out answers, in nats: near the reference.
KL_BOUNDS = {"dpo": 15.0, "kto": 15.0}


@pytest.mark.slow
@pytest.mark.parametrize("name", learning.RUNS)
def test_held_out_accuracy_rises(name):
  found = learning.run(name)
  before, after = found["before"], found["after"]
  if name != "reward":  # whose head is drawn, and may happen to lean to one side
    assert 0.4 < before["rewards/accuracy"] < 0.6, found
  assert after["rewards/accuracy"] > 0.9, found
  assert after["rewards/margin"] > before["rewards/margin"], found
  if name in KL_BOUNDS:
    assert after["kl"] < KL_BOUNDS[name], found
