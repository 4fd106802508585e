"""Starts programs in several processes with simulated devices, as one run."""

import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

from tests import forks, world

ROOT = pathlib.Path(__file__).parent.parent


def free_port():
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    return probe.getsockname()[1]


class Process:
  """A running program; what it prints goes to files, so that it never waits for us."""

  def __init__(self, arguments, environment, *, fork=False):
    files = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115
    self.out, self.error = files
    popen = forks.popen if fork else subprocess.Popen
    self.popen = popen(arguments, env=environment, stdout=self.out, stderr=self.error)

  def texts(self):
    """(stdout, stderr) so far."""
    return tuple(
      file.read() for file in (self.out, self.error) if file.seek(0) is not None
    )


def start(program, devices, *arguments, fork=False, **environment):
  """One process; `program` prints "done" at its end.

  `fork`: see tests/forks.py. Of a run's processes the first is no fork: forks have one
  seed of hashes, which would hide that processes go through a set in different orders.
  """
  settings = dict(
    os.environ,
    JAX_PLATFORMS="cpu",
    XLA_FLAGS=world.xla_flags(devices),
    PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
  )
  command = [sys.executable, str(program), *map(str, arguments)]
  return Process(command, settings | environment, fork=fork)


def together(program, count, devices, *arguments):
  """All processes of a run: `program RANK PORT *arguments`."""
  port = free_port()
  return [
    start(program, devices, rank, port, *arguments, fork=rank > 0)
    for rank in range(count)
  ]


def finish(*running, timeout=300):
  """Waits; every process must end well, and the first that does not ends the others.
  Returns what they logged."""
  end = time.monotonic() + timeout
  try:
    codes = [None]
    while None in codes and not any(codes) and time.monotonic() < end:
      time.sleep(0.05)
      codes = [process.popen.poll() for process in running]
  finally:
    for process in running:
      process.popen.kill()
      process.popen.wait()
  texts = [process.texts() for process in running]
  # Of those that ended badly by themselves, first.
  for (out, error), code in sorted(zip(texts, codes), key=lambda pair: not pair[1]):
    assert code == 0 and out.endswith("done\n"), (code, error[-3000:])
  return [error for _, error in texts]
