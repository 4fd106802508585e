"""Hosts that sample, in threads of the test's process or in processes of their own."""

import contextlib
import functools
import pathlib
import subprocess
import sys
import threading
from typing import Any

from tests import drills, forks, processes
from tests.rl import clusters
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.rl.rollout.host import RolloutHost
from tunix.serve import rollouts, server
from tunix.serve.settings import ServeSettings


def make(model: Any = None, **sampling: Any) -> RolloutHost:
  """A host with the toy model, whose rows fit those of `clusters.config`."""
  model = clusters.model() if model is None else model
  return RolloutHost(model, clusters.Words(), RolloutConfig(**sampling))


def settings(**changes: Any) -> ServeSettings:
  return ServeSettings(**{"port": 0, "max_body_bytes": 64 << 20, **changes})


@contextlib.contextmanager
def served(*makers: Any, **changes: Any):
  """Serves the host that each function makes; yields their addresses and the hosts."""
  ready, ends = threading.Barrier(len(makers) + 1, timeout=drills.DEADLINE_SECONDS), []
  urls, hosts = [""] * len(makers), [None] * len(makers)

  def run(number: int, maker: Any) -> None:
    try:
      hosts[number] = maker()  # in its thread, outside of any mesh of the test's
      chosen = settings(**changes)
      app = rollouts.make_app(hosts[number], chosen)

      def begun(address: str) -> None:
        urls[number] = address
        ready.wait()

      one = server.make_server(app, chosen, begun)
      ends.append(one)
      server.run_until_signal(one)
    except BaseException:  # raised again; the test must not wait for this thread
      ready.abort()
      raise

  threads = [
    threading.Thread(target=functools.partial(run, n, maker), daemon=True)
    for n, maker in enumerate(makers)
  ]
  for thread in threads:
    thread.start()
  ready.wait()
  try:
    yield urls, hosts
  finally:
    for one in ends:
      one.should_exit = True
    for thread in threads:
      thread.join(30)


class HostProcess:
  """A host in a process of its own, with the model of the kill drills.

  Attributes:
    url: its address.
  """

  def __init__(self, programs: pathlib.Path):
    self._port, self._programs = processes.free_port(), programs
    self.url = f"http://localhost:{self._port}"
    self._start()

  def _start(self) -> None:
    command = [sys.executable, "-m", "tests.rl.rollout.hosts"]
    self._process = forks.popen(
      [*command, str(self._port), str(self._programs)],
      cwd=drills.ROOT,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
    )

  def stop(self) -> None:
    """Kills the process."""
    self._process.kill()
    self._process.wait()

  def restart(self) -> None:
    """Kills the process, and starts another one at the same address."""
    self.stop()
    self._start()


def main() -> None:
  """Serves one host on a port: python -m tests.rl.rollout.hosts PORT PROGRAMS."""
  import jax

  port, programs = int(sys.argv[1]), pathlib.Path(sys.argv[2])
  jax.config.update("jax_compilation_cache_dir", str(programs))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  from tests.rl import drill_worker

  host = make(drill_worker.actor())
  rollouts.serve(host, settings(port=port), lambda url: print("at", url, flush=True))


if __name__ == "__main__":
  main()
