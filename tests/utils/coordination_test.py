import pathlib

import pytest

from tests import processes
from tunix.utils import coordination

PROGRAM = pathlib.Path(__file__).with_name("coordination_programs.py")


def test_two_processes():
  processes.finish(*processes.together(PROGRAM, 2, 1))


def test_one_process_meets_itself():
  assert coordination.gather("x", {"a": [1, None]}) == [{"a": [1, None]}]
  coordination.agree("x", {"a": "1"}, "nothing")


@pytest.mark.parametrize("signum", [None, 15])
def test_one_process_stops_at_once(signum):
  assert coordination.StopNotice(lag=4).due(signum, 0) == signum
