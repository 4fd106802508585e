"""Hostile programs against every set of protections that this machine can make."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import pytest

from tests.sandbox import hostile

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
  sys.platform != "linux" or os.geteuid() != 0, reason="needs Linux and root"
)
# What fails in a system, and the protections that are left, as root and as a user.
ALL = {"calls", "files", "network", "outside", "processes", "signals", "user"}
SITUATIONS = [
  ("root", (), ALL),
  ("root", ("namespaces",), ALL - {"files", "processes"}),
  ("root", ("namespaces", "landlock"), {"calls", "network", "signals", "user"}),
  ("root", ("namespaces", "landlock", "filters"), {"signals", "user"}),
  ("root", ("namespaces", "others"), ALL - {"files", "processes", "user"}),
  ("root", ("namespaces", "landlock", "others"), {"calls", "network"}),
  ("root", ("filters",), ALL - {"calls"}),
  ("user", (), ALL),
  ("user", ("namespaces",), {"calls", "network", "outside", "signals"}),
  ("user", ("namespaces", "landlock"), {"calls", "network"}),
  ("user", ("namespaces", "landlock", "filters"), set()),
  ("user", ("filters",), ALL - {"calls"}),
]


@pytest.fixture(scope="module")
def python():
  """A Python that every user can run."""
  # The folder of a virtual environment, which links to a Python, may be closed.
  for path in map(os.path.realpath, (sys.executable, "/usr/bin/python3")):
    folders = [pathlib.Path(path), *pathlib.Path(path).parents]
    is_open = all(x.exists() and x.stat().st_mode & 0o001 for x in folders)
    code = "import ctypes, sys; sys.exit(sys.version_info < (3, 11))"
    if is_open and not subprocess.run([path, "-c", code], check=False).returncode:
      return path
  pytest.skip("no Python of 3.11 or later that every user can run")


@pytest.fixture(scope="module")
def package():
  """A copy of the package that every user can read."""
  with tempfile.TemporaryDirectory(dir="/tmp") as name:
    folder = pathlib.Path(name)
    folder.chmod(0o755)
    shutil.copytree(
      ROOT / "tunix", folder / "tunix", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copyfile(hostile.__file__, folder / "hostile.py")
    subprocess.run(["chmod", "-R", "a+rX", name], check=True)
    yield folder


def tried(python, package, user, missing):
  out = subprocess.run(
    [python, "-I", package / "hostile.py", package, user, *missing],
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  assert not out.returncode, out.stderr
  return json.loads(out.stdout)


@pytest.mark.parametrize(
  ("user", "missing", "protections"),
  SITUATIONS,
  ids=["-".join((user, *missing)) for user, missing, _ in SITUATIONS],
)
def test_what_hostile_programs_reach(user, missing, protections, python, package):
  got = tried(python, package, user, missing)
  assert {*got["protections"]} == protections
  facts = {f"a trainer that is {'root' if user == 'root' else 'not root'}"}
  facts |= {"a system without namespaces"} if "namespaces" in missing else set()
  reached = [x.does for x in hostile.PROGRAMS if x.reaches(protections | facts)]
  assert got["reached"] == reached
  # Nothing else was harmed, and the report is the jail's own.
  result = got["result"]
  assert (result["finish"], result["exit_code"]) == ("error", 7), result
  assert result["protections"] == got["protections"]
  assert not got["ended"] and got["is_alive"] and not got["is_left"]


def test_the_guide_has_the_table():
  page = (ROOT / "docs" / "guides" / "tools.md").read_text()
  rows = re.findall(r"^\| (.*?) \| (.*?) \|$", page, re.M)
  for program in hostile.PROGRAMS:
    if program.stopped != hostile.NEVER:
      names = (x if " " in x else f"`{x}`" for x in program.stopped)
      assert (program.does, ", ".join(names)) in rows


def test_most_programs_fail_in_a_jail_without_any_protection():
  """The table would be vacuous if nothing needed a protection."""
  assert len(hostile.PROGRAMS) >= 40
  assert sum(x.stopped == hostile.NEVER for x in hostile.PROGRAMS) >= 12
  assert sum(x.reaches(set()) for x in hostile.PROGRAMS) >= 20
