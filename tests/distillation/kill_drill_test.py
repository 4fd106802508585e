"""Distillations that are killed end with the bytes of an untouched run."""

import sys

import pytest

from tests import drills


@pytest.mark.slow
@pytest.mark.parametrize(
  ("job", "kills"),
  [
    ("logit", 3),
    ("logit-lora", 1),
    ("cache", 2),
    ("projection-lora", 1),
    ("gkd", 1),
    ("policy-gradient-lora", 1),
  ],
)
def test_killed_runs_resume_exactly(tmp_path, job, kills):
  drill = drills.KillDrill(
    command=lambda folder: [
      *(sys.executable, "-m", "tests.distillation.drill_worker"),
      *(job, str(folder)),
    ]
  )
  drill.check(tmp_path, random_kills=kills)
