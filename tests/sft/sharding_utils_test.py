import pathlib

import pytest

from tests import processes

PROGRAMS = pathlib.Path(__file__).with_name("sharding_programs.py")


def test_eight_devices_in_one_process():
  processes.finish(processes.start(PROGRAMS, 8, "one_process"))


def test_two_processes_of_four_devices():
  port = processes.free_port()
  processes.finish(
    *(processes.start(PROGRAMS, 4, "two_processes", rank, port) for rank in range(2))
  )


@pytest.mark.parametrize("axes", [(), ("fsdp",), "fsdp"])
def test_without_a_mesh_batches_pass(axes):
  import numpy as np

  from tunix.sft.sharding_utils import shard_input

  out = shard_input({"x": np.arange(3), "y": None}, axes)
  assert out["x"].tolist() == [0, 1, 2] and out["y"] is None
