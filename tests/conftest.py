"""The test world: CPU, as eight devices, set before anything imports jax.

Compiling is most of what the suite costs, so LLVM's expensive passes are off (what XLA
fuses and plans stays the same) and equal programs are compiled once for all workers and
for the processes that tests start. The slow tests do without both.
"""

import atexit
import os
import shutil
import signal
import tempfile

import pytest

from tests import long_tests

os.environ["JAX_PLATFORMS"] = "cpu"
_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=8".strip()


def pytest_configure(config: pytest.Config) -> None:
  """Makes the quick suite quick; the slow tests run what is shipped."""
  if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started with nohup or `&`
    signal.signal(signal.SIGINT, signal.default_int_handler)
  is_worker = "PYTEST_XDIST_WORKER" in os.environ
  if is_worker or "not slow" not in config.option.markexpr:
    return
  programs = tempfile.mkdtemp(prefix="tunix-tests-")
  atexit.register(shutil.rmtree, programs, True)
  os.environ |= {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_COMPILATION_CACHE_DIR": programs,
  }


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(
  config: pytest.Config, items: list[pytest.Item]
) -> None:
  """Marks the tests that `make check` leaves to CI."""
  names = long_tests.listed()
  found = {item.nodeid for item in items}
  for item in items:
    if item.nodeid in names:
      item.add_marker("long")
  if any("::" in arg for arg in config.args) or config.getoption("lf", False):
    return  # single tests were asked for: not whole files
  files = {name.partition("::")[0] for name in found}
  gone = {name for name in names - found if name.partition("::")[0] in files}
  if gone:
    raise pytest.UsageError(
      f"{long_tests.FILE} lists tests that are gone or renamed: {sorted(gone)};"
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
