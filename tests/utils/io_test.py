import json
import os
import stat
import subprocess
import sys

import pytest

from tunix.utils import io


def test_writes_and_replaces(tmp_path):
  path = tmp_path / "deep" / "x"
  io.write_atomic(path, b"1")
  io.write_atomic(path, b"22")
  assert path.read_bytes() == b"22"
  assert os.listdir(path.parent) == ["x"]


def test_json_keeps_the_order_of_keys(tmp_path):
  io.write_json(tmp_path / "x.json", {"b": 1, "a": [2]})
  text = (tmp_path / "x.json").read_text()
  assert text.endswith("}\n") and list(json.loads(text)) == ["b", "a"]


def test_usual_permissions(tmp_path):
  old = os.umask(0o027)
  try:
    io.write_atomic(tmp_path / "x", b"")
  finally:
    os.umask(old)
  assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640


def test_failure_leaves_the_old_file_and_nothing_else(tmp_path):
  io.write_atomic(tmp_path / "x", b"old")
  with pytest.raises(TypeError):
    io.write_atomic(tmp_path / "x", "no bytes")
  assert (tmp_path / "x").read_bytes() == b"old"
  assert os.listdir(tmp_path) == ["x"]


FULL_DISK = """
import resource, signal, sys
from tunix.utils import io
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
  io.write_atomic(sys.argv[1], b"x" * 100_000)
except OSError as error:
  print("OSError")
"""


def test_full_disk(tmp_path):
  io.write_atomic(tmp_path / "x", b"old")
  out = subprocess.run(
    [sys.executable, "-c", FULL_DISK, str(tmp_path / "x")],
    capture_output=True,
    text=True,
  )
  assert out.stdout == "OSError\n", out.stderr
  assert (tmp_path / "x").read_bytes() == b"old"
  assert os.listdir(tmp_path) == ["x"]


def test_what_a_killed_process_left_is_swept_and_nothing_else(tmp_path):
  """Of dead processes of this machine: a file and a folder, at any depth."""
  dead = subprocess.run(
    [sys.executable, "-c", "import os; print(os.getpid())"],
    capture_output=True,
    text=True,
    check=True,
  ).stdout.strip()
  mine = io.unfinished("x")
  theirs = mine.replace(f"-{os.getpid()}-", f"-{dead}-")
  elsewhere = f".x.another_host-{dead}-01234567.partial"
  (tmp_path / "deep" / theirs).mkdir(parents=True)
  (tmp_path / "deep" / theirs / "weights").write_text("")
  stay = [mine, elsewhere, "of_a_user.partial", "x"]
  for name in [theirs, *stay]:
    (tmp_path / name).write_text("")
  io.sweep(tmp_path)
  assert sorted(os.listdir(tmp_path)) == sorted(["deep", *stay])
  assert os.listdir(tmp_path / "deep") == []
