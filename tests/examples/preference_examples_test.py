"""The examples of preferences and distillation, as their readers run them."""

import pathlib
import re
import sys

import pytest

from tests import forks

EXAMPLES = pathlib.Path(__file__).parent.parent.parent / "examples"


def run(name, folder, steps):
  """(before, after) that the example prints."""
  command = [sys.executable, EXAMPLES / f"{name}.py", "--output", folder]
  done = forks.run(
    [*command, "--steps", str(steps)], capture_output=True, text=True, timeout=600
  )
  assert done.returncode == 0, done.stderr
  found = re.search(r"held-out \S+ (\S+) -> (\S+)", done.stdout)
  assert found is not None, done.stdout
  return float(found[1]), float(found[2])


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "before", "after"),
  [
    pytest.param("dpo", 0.5, 0.95, marks=pytest.mark.ci),  # 0.5: it is its reference
    ("orpo", 0.0, 0.95),
    ("kto", 0.0, 0.5),  # of a margin, which begins at 0
    ("reward", 0.0, 0.95),
  ],
)
def test_preferences_are_learnt(name, before, after, tmp_path):
  first, last = run(name, tmp_path, 60)
  assert first >= before
  assert last >= after


@pytest.mark.slow
def test_a_student_learns_from_its_teacher(tmp_path):
  first, last = run("distill", tmp_path, 60)
  assert first > 2.0
  assert last < 0.6  # 0.2 where it was written; a uniform guess has 2.6


@pytest.mark.slow
def test_an_example_goes_on_where_it_was_stopped(tmp_path):
  assert run("dpo", tmp_path, 20)[0] == 0.5
  first, last = run("dpo", tmp_path, 40)
  assert first > 0.5 and last >= first  # its first evaluation is that of step 20


@pytest.mark.parametrize("name", ["dpo", "orpo", "kto", "reward", "distill"])
def test_examples_stay_short(name):
  assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 120
