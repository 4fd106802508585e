"""What a plan says of a step's memory, beside what the running step takes."""

import json
import subprocess
import sys

import pytest

from tests.cli import runs


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.shipped
def test_the_planned_peak_is_what_a_step_takes():
  command = [sys.executable, "benchmarks/plan_memory.py"]
  command += ["--training.global_batch_size=8", "--data.max_length=256"]
  command += ["--model.remat=block"]
  done = subprocess.run(
    command, cwd=runs.ROOT, capture_output=True, text=True, timeout=600, check=False
  )
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout)
  assert found["topology"] == "cpu:8"
  assert abs(found["planned_over_taken"] - 1) < 0.05, found
