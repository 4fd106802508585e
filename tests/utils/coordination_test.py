import pathlib
import types
from typing import Any

import pytest

from tests import processes
from tunix.perf.trace import NoopTracer
from tunix.sft.config import TrainingConfig
from tunix.sft.loop.run import Run
from tunix.utils import coordination

PROGRAM = pathlib.Path(__file__).with_name("coordination_programs.py")


def test_two_processes():
  processes.finish(*processes.together(PROGRAM, 2, 1))


def test_one_process_meets_itself():
  assert coordination.gather("x", {"a": [1, None]}) == [{"a": [1, None]}]
  coordination.agree("x", {"a": "1"}, "nothing")
  assert coordination.exchange("x", lambda: coordination.share(3)[-1], 1) == [2]


@pytest.mark.parametrize("signum", [None, 15])
def test_one_process_stops_at_once(signum):
  assert coordination.StopNotice(lag=4).due(signum, 0) == signum


@pytest.mark.slow
@pytest.mark.ci
def test_a_process_that_hangs_in_python_is_named():
  """Its threads live, and it is heard of; what it is at is told with that."""
  program = PROGRAM.with_name("stall_program.py")
  running = processes.together(program, 2, 1)
  codes = [process.popen.wait(timeout=60) for process in running]
  assert codes == [1, 1], [process.texts()[1] for process in running]
  for process in running:
    error = process.texts()[1]
    assert "process 1 of 2 has been at its data for" in error, error[-2000:]
    assert "stall_s (now 2;" in error


def test_drawing_data_is_done_alone():
  work: Any = types.SimpleNamespace(
    train_steps=0, _draw=lambda source: coordination.longest_alone()
  )
  run = Run(work, TrainingConfig(eval_every_n_steps=1), NoopTracer())
  what, seconds = run._draw(None)
  assert what == "its data" and seconds >= 0
  assert coordination.longest_alone() == ("", 0.0)
