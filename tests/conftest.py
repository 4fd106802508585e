"""The test world: CPU, as eight devices, set before anything imports jax.

Compiling is most of what the suite costs, so compiled programs are kept between runs,
outside the tree: a program is compiled once for all workers, for the processes that
tests start and for every later run. LLVM's expensive passes are off (what XLA fuses and
plans stays the same), but in the slow tests: they run the programs that are shipped.
"""

import gc
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import signal
import sys
import time

import pytest

from tests import long_tests

os.environ["JAX_PLATFORMS"] = "cpu"
_FLAGS = {
  "--xla_force_host_platform_device_count": 8,
  # XLA aborts the process when a device has not come to a collective within 40 s, which
  # eight devices on two busy cores may take.
  "--xla_cpu_collective_call_terminate_timeout_seconds": 600,
}
for _flag, _value in _FLAGS.items():
  if _flag not in os.environ.get("XLA_FLAGS", ""):
    _others = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{_others} {_flag}={_value}".strip()


# One operation after the other: where many that run op by op on eight devices are in
# flight, their collectives can wait for each other for ever.
os.environ.setdefault("JAX_CPU_ENABLE_ASYNC_DISPATCH", "false")


def pytest_configure(config: pytest.Config) -> None:
  """Sets JAX up for this run: see the top of this file."""
  if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started with nohup or `&`
    signal.signal(signal.SIGINT, signal.default_int_handler)
  is_worker = "PYTEST_XDIST_WORKER" in os.environ
  if is_worker:
    return  # they have it from the process that started them
  settings = {
    "jax_disable_most_optimizations": "not slow" in config.option.markexpr,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_compilation_cache_dir": str(_programs()),
  }
  # For workers and for the processes that tests start.
  os.environ |= {name.upper(): str(value) for name, value in settings.items()}
  if (jax := sys.modules.get("jax")) is not None:
    # A plugin has imported it, and it has read its environment: without workers (-n 0)
    # this process would compile otherwise than those that it starts.
    for name, value in settings.items():
      jax.config.update(name, value)


def _programs() -> pathlib.Path:
  """Where compiled programs lie: one folder a JAX, a Python and a kind of processor,
  since a program built for another one may not run. `TUNIX_TEST_CACHE` moves it."""
  cpu = pathlib.Path("/proc/cpuinfo")
  lines = cpu.read_text().splitlines() if cpu.exists() else []
  flags = [x for x in lines if x.startswith("flags")][:1] or [platform.processor()]
  kind = hashlib.sha256(repr((platform.machine(), flags)).encode()).hexdigest()[:8]
  versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib")]
  root = (
    os.environ.get("TUNIX_TEST_CACHE") or pathlib.Path.home() / ".cache/tunix-tests"
  )
  return pathlib.Path(root) / "-".join([*versions, platform.python_version(), kind])


# A compiled program is some ten mappings of memory. Linux allows a process 65,530, and
# XLA aborts the process that asks for one more: the whole suite in two processes does,
# and so does one file that calls models of all families operation by operation.
_MOST_MAPPINGS = 20_000
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
  if maps.exists() and maps.read_bytes().count(b"\n") > _MOST_MAPPINGS:
    jax.clear_caches()
    gc.collect()


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(
  config: pytest.Config, items: list[pytest.Item]
) -> None:
  """Marks the tests that `make check` leaves to CI, and those that CI leaves out."""
  found = {item.nodeid for item in items}
  for file, mark in ((long_tests.LONG, "long"), (long_tests.SLOW, "slow")):
    names = long_tests.listed(file)
    for item in items:
      if item.nodeid in names:
        item.add_marker(mark)
    _check_listed(config, file, names, found)


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
