"""RL runs that are killed at awkward moments end with the bytes of an untouched run."""

import sys

import pytest

from tests import drills


@pytest.mark.slow
@pytest.mark.parametrize(
  ("job", "kills"),
  [
    pytest.param("grpo", 8),
    pytest.param("ppo", 8),
    pytest.param("grpo-lora", 1, marks=pytest.mark.ci),
    ("dapo", 2),
    ("lagged", 2),
    ("lagged-env", 2),
  ],
)
def test_killed_runs_resume_exactly(tmp_path, job, kills):
  drill = drills.KillDrill(
    command=lambda folder: [
      *(sys.executable, "-m", "tests.rl.drill_worker"),
      *(job, str(folder)),
    ]
  )
  drill.check(tmp_path, random_kills=kills)
