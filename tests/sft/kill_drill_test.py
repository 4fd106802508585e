"""Runs that are killed at awkward moments end with the bytes of an untouched run."""

import pytest

from tests import drills


@pytest.mark.slow
@pytest.mark.parametrize(
  ("job", "kills"),
  [
    pytest.param("lora-packed", 2, marks=pytest.mark.ci),
    ("full-packed", 4),
    ("full", 3),
    ("lora", 3),
  ],
)
def test_killed_runs_resume_exactly(tmp_path, job, kills):
  drill = drills.KillDrill(command=drills.worker(job))
  drill.check(tmp_path, random_kills=kills)
