"""Losses and gradients of every kind of job, on 1, 2, 4 and 8 devices along every axis,
and in 2 and 4 processes: those of one device, to 1e-5 of each gradient's norm."""

import functools
import pathlib

import numpy as np
import pytest

from tests import jobs_on_meshes, processes

PROGRAM = pathlib.Path(__file__).with_name("jobs_on_meshes.py")


@functools.cache
def alone(job):
  return jobs_on_meshes.learnt(job, "one device")


def check(job, got):
  want = alone(job)
  assert got.keys() == want.keys() and len(want) > 5
  for name, value in want.items():
    gap = np.linalg.norm(got[name] - value) / np.linalg.norm(value)
    assert gap < 1e-5, (job, name, gap)


@pytest.mark.slow
@pytest.mark.parametrize("job", jobs_on_meshes.JOBS)
def test_devices(job):
  for mesh in jobs_on_meshes.MESHES:
    check(job, jobs_on_meshes.learnt(job, mesh))


@pytest.mark.slow
@pytest.mark.ci
def test_a_job_on_a_mesh():
  check("grpo", jobs_on_meshes.learnt("grpo", "fsdp 4 x tp 2"))


@pytest.mark.slow
@pytest.mark.parametrize("job", ["sft", "dpo", "distill"])
@pytest.mark.parametrize(
  ("count", "mesh"), [(2, "fsdp 8"), (2, "fsdp 4 x tp 2"), (4, "dp 8"), (2, "cp 8")]
)
def test_processes(job, count, mesh, tmp_path):
  check_processes(job, count, mesh, tmp_path)


@pytest.mark.slow
@pytest.mark.ci
def test_four_processes_on_a_mesh(tmp_path):
  check_processes("sft", 4, "fsdp 4 x tp 2", tmp_path)


def check_processes(job, count, mesh, tmp_path):
  port, devices = processes.free_port(), 8 // count
  words = (port, count, tmp_path, job, mesh)
  processes.finish(
    *(
      processes.start(PROGRAM, devices, rank, *words, fork=rank > 0)
      for rank in range(count)
    )
  )
  for rank in range(count):
    check(job, dict(np.load(tmp_path / f"{rank}.npz")))
