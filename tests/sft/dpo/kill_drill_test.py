"""Preference runs that are killed end with the bytes of an untouched run."""

import sys

import pytest

from tests import drills


@pytest.mark.slow
@pytest.mark.parametrize(
  ("job", "kills"),
  [
    ("dpo-lora", 1),
    ("dpo", 2),
    ("dpo-lora-rows", 1),
    ("aot-lora", 1),
    ("kto-lora", 2),
    ("reward", 1),
  ],
)
def test_killed_runs_resume_exactly(tmp_path, job, kills):
  drill = drills.KillDrill(
    command=lambda folder: [
      *(sys.executable, "-m", "tests.sft.dpo.drill_worker"),
      *(job, str(folder)),
    ]
  )
  drill.check(tmp_path, random_kills=kills)
