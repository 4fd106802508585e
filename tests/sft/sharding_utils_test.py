import os
import pathlib
import socket
import subprocess
import sys

import pytest

PROGRAMS = pathlib.Path(__file__).with_name("sharding_programs.py")


def start(devices, *arguments):
  root = str(PROGRAMS.parent.parent.parent)
  environment = dict(
    os.environ,
    JAX_PLATFORMS="cpu",
    XLA_FLAGS=f"--xla_force_host_platform_device_count={devices}",
    PYTHONPATH=os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
  )
  return subprocess.Popen(
    [sys.executable, str(PROGRAMS), *map(str, arguments)],
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def finish(*processes):
  try:
    results = [process.communicate(timeout=300) for process in processes]
  finally:
    for process in processes:
      process.kill()
  for process, (out, error) in zip(processes, results):
    assert process.returncode == 0 and out.endswith("done\n"), error[-3000:]


def test_eight_devices_in_one_process():
  finish(start(8, "one_process"))


def test_two_processes_of_four_devices():
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    port = probe.getsockname()[1]
  finish(*(start(4, "two_processes", rank, port) for rank in range(2)))


@pytest.mark.parametrize("axes", [(), ("fsdp",), "fsdp"])
def test_without_a_mesh_batches_pass(axes):
  import numpy as np

  from tunix.sft.sharding_utils import shard_input

  out = shard_input({"x": np.arange(3), "y": None}, axes)
  assert out["x"].tolist() == [0, 1, 2] and out["y"] is None
