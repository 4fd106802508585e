"""The test run: sets the environment of tests/world.py before anything imports jax."""

import ctypes
import gc
import os
import pathlib
import resource
import signal
import sys
import time

import pytest

from tests import timings, world
from tunix.cli import main

# What a run with shipped settings selects; see tests/world.py.
_SHIPPED_RUNS = ("slow", world.SHIPPED)


def pytest_configure(config: pytest.Config) -> None:
  """Sets JAX up for this run."""
  if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started with nohup or `&`
    signal.signal(signal.SIGINT, signal.default_int_handler)
  gc.set_threshold(*main.GC_THRESHOLD)  # a fifth of the processor time of tracing
  if "PYTEST_XDIST_WORKER" in os.environ:
    return  # workers have it from the process that started them
  shipped = world.is_shipped() or config.option.markexpr in _SHIPPED_RUNS
  world.choose(shipped=shipped)
  if (jax := sys.modules.get("jax")) is not None:
    # A plugin has imported it, and it has read its environment: without workers (-n 0)
    # this process would compile otherwise than those that it starts.
    for name, value in world.settings().items():
      jax.config.update(name, value)


# A compiled program is some ten mappings of memory. Linux allows a process 65,530, and
# XLA aborts the process that asks for one more: the whole suite in two processes does,
# and so does one file that calls models of all families operation by operation.
_MOST_MAPPINGS = 20_000
# Three workers share the memory of CI's machine, and the largest tests need 6 GB of it.
_MOST_BYTES = 3 << 30
_LOOK_S = 10.0  # between two looks within a file: reading 20,000 lines takes some ms
_looked = 0.0
_now = time.monotonic  # as it is here: tests replace it


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
  """Lets go of the programs of the tests before where they are many."""
  global _looked
  jax, maps = sys.modules.get("jax"), pathlib.Path("/proc/self/maps")
  if jax is None or nextitem is None:
    return
  if nextitem.path == item.path and _now() - _looked < _LOOK_S:
    return
  _looked = _now()
  if not maps.exists():
    return
  is_large = nextitem.path != item.path and _resident_bytes() > _MOST_BYTES
  if is_large or maps.read_bytes().count(b"\n") > _MOST_MAPPINGS:
    jax.clear_caches()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else the C library keeps what was freed


def _resident_bytes() -> int:
  pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
  return int(pages) * resource.getpagesize()


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(
  config: pytest.Config, items: list[pytest.Item]
) -> None:
  """Marks what `make check` leaves to CI and what CI leaves out; sorts the files."""
  recorded = timings.read()
  slow = set(timings.SLOW.read_text().splitlines())
  known = set()
  for item in items:
    fixtures = getattr(item, "fixturenames", ())
    file = item.nodeid.partition("::")[0]
    known |= {timings.function_of(item.nodeid), *(f"{file}::{x}" for x in fixtures)}
    if timings.is_long(item.nodeid, fixtures, recorded):
      item.add_marker("long")
    if item.nodeid in slow:
      item.add_marker("slow")
  ids = {item.nodeid for item in items}
  _check_listed(config, timings.SLOW, slow, ids)
  _check_listed(config, timings.FILE, set(recorded), known)
  seconds = timings.by_file(recorded)
  items.sort(key=lambda item: -seconds[item.nodeid.partition("::")[0]])


def pytest_collection_finish() -> None:
  """Takes what the imports have made out of all later collections of garbage."""
  gc.collect()
  gc.freeze()  # 7 % of the processor time of tests/rl/rl_learner_test.py


def _check_listed(
  config: pytest.Config, file: pathlib.Path, names: set[str], found: set[str]
) -> None:
  if any("::" in arg for arg in config.args) or config.getoption("lf", False):
    return  # single tests were asked for: not whole files
  files = {name.partition("::")[0] for name in found}
  gone = {name for name in names - found if name.partition("::")[0] in files}
  if gone:
    raise pytest.UsageError(
      f"{file} lists tests that are gone or renamed: {sorted(gone)};"
      " rename them there or take them out"
    )


@pytest.fixture(scope="session")
def mesh_fsdp8():
  from tunix.utils import mesh

  return mesh.create_mesh({"fsdp": 8})


@pytest.fixture(scope="session")
def mesh_fsdp4_tp2():
  from tunix.utils import mesh

  return mesh.create_mesh({"fsdp": 4, "tp": 2})
