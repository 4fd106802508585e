import pathlib
from types import SimpleNamespace

import numpy as np
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
  from tunix.sft.sharding_utils import shard_input

  out = shard_input({"x": np.arange(3), "y": None}, axes)
  assert out["x"].tolist() == [0, 1, 2] and out["y"] is None


@pytest.mark.parametrize(
  ("shape", "axes", "mine"),
  [
    # Two devices a process: its own rows, rows that two have in common, or all have.
    ({"fsdp": 8}, ("fsdp",), [(0, 4), (1, 4), (2, 4), (3, 4)]),
    ({"fsdp": 2, "cp": 4}, ("fsdp",), [(0, 2), (0, 2), (1, 2), (1, 2)]),
    ({"cp": 4, "fsdp": 2}, ("fsdp",), [(0, 1)] * 4),
    ({"cp": 8}, (), [(0, 1)] * 4),
  ],
)
def test_the_part_of_a_batch_that_a_process_draws(shape, axes, mine, monkeypatch):
  from tunix.sft.sharding_utils import process_part

  devices = np.array([SimpleNamespace(process_index=i // 2) for i in range(8)])
  mesh = SimpleNamespace(
    axis_names=tuple(shape), shape=shape, devices=devices.reshape(*shape.values())
  )
  monkeypatch.setattr("jax.process_count", lambda: 4)
  found = []
  for process in range(4):
    monkeypatch.setattr("jax.process_index", lambda process=process: process)
    found.append(process_part(mesh, axes))
  assert found == mine


def test_rows_that_processes_share_in_part_are_refused(monkeypatch):
  from tunix.sft.sharding_utils import process_part

  owners = np.array([0, 0, 1, 1, 1, 2]).reshape(3, 2)
  devices = np.vectorize(lambda i: SimpleNamespace(process_index=i))(owners)
  mesh = SimpleNamespace(axis_names=("fsdp", "cp"), shape={}, devices=devices)
  monkeypatch.setattr("jax.process_count", lambda: 3)
  with pytest.raises(ValueError, match="some of their rows in common"):
    process_part(mesh, ("fsdp",))
