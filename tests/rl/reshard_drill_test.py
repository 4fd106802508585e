"""How much memory the drill of reshard_test takes, counted by the system."""

import json
import pathlib

import pytest

from tests import processes

PROGRAM = pathlib.Path(__file__).with_name("reshard_program.py")
LARGEST = 64  # MiB, of the program's three tensors
BUDGET = 64  # for what compiled programs take for themselves while shards move


@pytest.mark.slow
def test_8_to_2x4_to_4_to_1_and_back():
  # Freed shards go back to the system at once, and do not count as held.
  process = processes.start(PROGRAM, 8, MALLOC_MMAP_THRESHOLD_="65536")
  processes.finish(process)
  rises = json.loads(process.texts()[0].splitlines()[0])
  assert len(rises) == 6 and max(rises) <= 2 * LARGEST + BUDGET, rises
