"""Faults of one process of two: each process ends with a line that names the cause,
nothing that was saved is lost, and the run resumes."""

import hashlib
import os
import resource
import shutil
import subprocess
import time

import pytest

from tests import processes
from tests.cli import several_test as several
from tests.cli.several_test import complaints, ends, files, start, undisturbed

__all__ = ["files", "undisturbed"]  # fixtures

SECONDS = 240  # after which a process counts as hanging


def contents(folder):
  """SHA-256 of every file below a folder, by path."""
  return {
    path.relative_to(folder): hashlib.sha256(path.read_bytes()).hexdigest()
    for path in sorted(folder.rglob("*"))
    if path.is_file()
  }


def assert_same_end(out, whole):
  """Metrics, weights and checkpoints' steps are those of the undisturbed run."""
  assert several.losses(out) == several.losses(whole)
  for pattern in ("logs/metrics.jsonl", "export/*"):
    names = sorted(x.relative_to(whole) for x in whole.glob(pattern))
    assert names == sorted(x.relative_to(out) for x in out.glob(pattern)) and names
    for name in names:
      assert (out / name).read_bytes() == (whole / name).read_bytes(), name
  names = [{x.name for x in (y / "checkpoints").iterdir()} for y in (out, whole)]
  assert names[0] == names[1]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_of_one(rank, undisturbed, files, tmp_path):
  """From the first checkpoint on, no file of one process grows beyond 45 kB."""
  whole, _ = undisturbed
  out = tmp_path / "out"
  running = start(files, out, fork=False)  # whose limits this process changes
  while not (out / "checkpoints" / "2").is_dir():
    time.sleep(0.01)
    assert all(p.popen.poll() is None for p in running), [p.texts() for p in running]
  resource.prlimit(running[rank].popen.pid, resource.RLIMIT_FSIZE, (45_000, 45_000))
  saved = contents(out / "checkpoints" / "2")
  codes, errors = ends(*running, within=SECONDS)
  assert contents(out / "checkpoints" / "2") == saved
  assert codes == [1, 1], errors
  for error in errors:
    assert len(complaints(error)) == 1 and "Traceback" not in error, error
  assert "File too large. Earlier checkpoints are unchanged: make room" in errors[rank]
  assert f"process {rank} of 2 failed: " in errors[1 - rank]
  assert "File too large" in errors[1 - rank]
  processes.finish(*start(files, out))
  assert_same_end(out, whole)


@pytest.fixture
def small_disk(tmp_path):
  """A file system of 16 MB."""
  folder = tmp_path / "disk"
  folder.mkdir()
  mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder]
  if subprocess.run(mount, stderr=subprocess.DEVNULL).returncode:
    pytest.skip("mounting needs root")
  yield folder
  subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.slow
def test_a_full_disk_of_both(undisturbed, files, small_disk):
  """From the first checkpoint on, the disk has 8 kB left."""
  whole, _ = undisturbed
  out, ballast = small_disk / "out", small_disk / "ballast"
  running = start(files, out)
  while not (out / "checkpoints" / "2").is_dir():
    time.sleep(0.01)
    assert all(p.popen.poll() is None for p in running), [p.texts() for p in running]
  free = shutil.disk_usage(small_disk).free
  with ballast.open("wb") as file:
    os.posix_fallocate(file.fileno(), 0, free - 8192)
  saved = contents(out / "checkpoints" / "2")
  codes, errors = ends(*running, within=SECONDS)
  assert contents(out / "checkpoints" / "2") == saved
  assert codes == [1, 1], errors
  for error in errors:
    assert len(complaints(error)) == 1 and "Traceback" not in error, error
  assert any("No space left on device" in error for error in errors), errors
  ballast.unlink()
  processes.finish(*start(files, out))
  assert_same_end(out, whole)


@pytest.mark.slow
def test_one_that_is_late_or_differs(undisturbed, files, tmp_path):
  """Refused starts change no checkpoint; one that comes in time resumes the run."""
  whole, _ = undisturbed
  out = tmp_path / "out"
  processes.finish(*start(files, out, **{"training.max_steps": 2}))
  saved = contents(out)
  other = [{}, {"training.learning_rate": 0.02}]
  codes, errors = ends(*start(files, out, each=other), within=SECONDS)
  assert codes == [2, 2], errors
  for error in errors:
    assert "training.learning_rate is '0.01' on process 0 and '0.02'" in error
  assert contents(out) == saved

  alone, late = start(files, out, delays=[0, 12], **{"distributed.timeout_s": 5})
  codes, errors = ends(alone, late, within=SECONDS)
  assert codes == [1, 1], errors
  assert "process 0 of 2 waited 5 s for the others" in errors[0], errors[0]
  assert "did not answer within 5 s" in errors[1], errors[1]
  assert contents(out) == saved

  processes.finish(*start(files, out, delays=[0, 5]))
  assert_same_end(out, whole)
