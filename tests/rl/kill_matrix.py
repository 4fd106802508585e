"""Kills RL runs at random instants: python -m tests.rl.kill_matrix --kills 100.

The kills are spread over the schedules sync, lagged and greedy, one turn and many
turns, one and two processes. A run is killed, resumed and killed again
until it ends, and what it leaves must have the bytes of a run that was never touched. A
greedy run must have drawn each completion once, and its replay must end with its bytes.
With two processes, one of them is killed, or both; a process whose partner is gone must
end by itself.
"""

import argparse
import collections
import contextlib
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from tests import drills, processes, world
from tests.rl import drill_worker
from tests.rl.rollout.hosts import HostProcess
from tunix.rl.schedules import journal

# Of drill_worker.py.
JOBS = (
  *("grpo", "grpo-env", "lagged", "lagged-env", "greedy", "greedy-env"),
  *("lagged-curriculum", "greedy-curriculum"),
  "greedy-env-hosts",  # of which some are killed too
)
HEARTBEAT_S = 10
STARTED = "starts from step"


class Running:
  """The processes of one run, whose output goes to a file each."""

  def __init__(self, job: str, count: int, folder: pathlib.Path):
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
      "JAX_PLATFORMS": "cpu",
      "XLA_FLAGS": world.xla_flags(devices=1),
      "JAX_COMPILATION_CACHE_DIR": str(folder.parent / f"programs-{count}"),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    port = processes.free_port()
    more = lambda rank: [str(rank), str(count), str(port)] if count > 1 else []
    self.logs = [folder / f"output-{rank}.txt" for rank in range(count)]
    self.popens = []
    for rank, log in enumerate(self.logs):
      with log.open("w") as file:
        self.popens.append(
          subprocess.Popen(
            [
              *(sys.executable, "-m", "tests.rl.drill_worker"),
              *(job, str(folder), *more(rank)),
            ],
            cwd=drills.ROOT,
            env=os.environ | environment,
            stdout=file,
            stderr=subprocess.STDOUT,
          )
        )

  def text(self) -> str:
    """What the processes printed."""
    return "\n".join(log.read_text() for log in self.logs)

  def wait_until_started(self) -> int:
    """Returns the step that the run starts from."""
    end = time.monotonic() + drills.DEADLINE_SECONDS
    while not all(STARTED in log.read_text() for log in self.logs):
      assert all(p.poll() in (None, 0) for p in self.popens), self.text()
      assert time.monotonic() < end, "the run did not start"
      time.sleep(0.01)
    found = re.search(rf"{STARTED} (\d+)", self.text())
    assert found
    return int(found[1])

  def wait(self, seconds: float) -> list[int]:
    """Waits for the end of all processes; returns their exit codes."""
    end = time.monotonic() + seconds
    try:
      return [p.wait(max(0.0, end - time.monotonic())) for p in self.popens]
    finally:
      for p in self.popens:
        if p.poll() is None:
          p.kill()

  def is_over(self) -> bool:
    """Whether a process has ended."""
    return any(p.poll() is not None for p in self.popens)


class Case:
  """One cell of the matrix: a job in a number of processes."""

  def __init__(self, job: str, count: int, folder: pathlib.Path, seed: int):
    self.job, self.count, self.folder = job, count, folder
    self.kills = self.runs = 0
    self._dice = random.Random(f"{job} {count} {seed}")
    self._drill = drills.KillDrill(command=lambda folder: [])
    has_hosts, programs = job.endswith("-hosts"), folder / f"programs-{count}"
    self._hosts = [HostProcess(programs) for _ in range(count * has_hosts)]
    os.environ[drill_worker.HOSTS] = " ".join(host.url for host in self._hosts)
    # The first run compiles; the second one tells how long a killed run would take.
    for name in ("whole", "again"):
      run = Running(job, count, folder / name)
      assert run.wait_until_started() == 0
      began = time.monotonic()
      codes = run.wait(drills.DEADLINE_SECONDS)
      assert codes == [0] * count, run.text()
      self._seconds = time.monotonic() - began
    self._expected = self._drill.digest(folder / "whole")

  def run(self, kills: int) -> None:
    """Kills runs `kills` times, and compares what each of them leaves."""
    left = kills
    while left:
      folder = self.folder / f"cut{self.runs}"
      left -= self._killed_run(folder, left)
      self._compare(folder)
      self.runs += 1

  def close(self) -> None:
    """Ends the hosts."""
    for host in self._hosts:
      host.stop()

  def _compare(self, folder: pathlib.Path) -> None:
    expected = self._expected
    if self.job.startswith("greedy"):
      check_journal(folder)
      replay = folder.with_name(f"replay_{folder.name}")
      run = Running(self.job, self.count, replay)
      codes = run.wait(drills.DEADLINE_SECONDS)
      assert codes == [0] * self.count, run.text()
      expected = self._drill.digest(replay)
    found = self._drill.digest(folder)
    different = [k for k in expected if expected[k] != found.get(k)]
    assert found.keys() == expected.keys() and not different, (
      f"{self.job} in {self.count} processes, {folder}: {different} differ"
    )

  def _killed_run(self, folder: pathlib.Path, most: int) -> int:
    """Kills one run at most so many times, until it ends; returns the kills."""
    kills = 0
    while True:
      run = Running(self.job, self.count, folder)
      run.wait_until_started()
      if kills == most:
        codes = run.wait(drills.DEADLINE_SECONDS)
        assert codes == [0] * self.count, run.text()
        return kills
      end = time.monotonic() + self._dice.uniform(0.0, 0.7 * self._seconds)
      while time.monotonic() < end and not run.is_over():
        time.sleep(0.001)
      if run.is_over():
        codes = run.wait(drills.DEADLINE_SECONDS)
        assert codes == [0] * self.count, run.text()
        return kills
      if self._killed(run):
        kills += 1
        self.kills += 1
      else:
        return kills

  def _killed(self, run: Running) -> bool:
    """Kills processes of a run; returns False if it has ended just before."""
    if self._hosts and self._dice.random() < 0.5:
      self._dice.choice(self._hosts).restart()
      time.sleep(self._dice.uniform(0.0, self._seconds))
    ranks = range(self.count)
    victims = self._dice.choice([[rank] for rank in ranks] + [list(ranks)])
    for rank in victims:
      run.popens[rank].send_signal(signal.SIGKILL)
    # A partner may have ended its last step, and may still wait for the heartbeat.
    codes = run.wait(6 * HEARTBEAT_S)
    if not any(codes):
      return False
    killed = [codes[rank] for rank in victims]
    assert -signal.SIGKILL in killed, run.text()
    assert set(killed) <= {-signal.SIGKILL, 0}, run.text()
    return True


def check_journal(folder: pathlib.Path) -> None:
  """Checks that a greedy run has drawn each of its completions once."""
  base = folder / "checkpoints" / journal.FOLDER
  files = sorted(base.rglob(journal.DECISIONS))  # one for each process
  records = []
  for file in files:
    with contextlib.closing(journal.Journal(file.parent, reads=True)) as found:
      records += found.decisions
  ends = collections.Counter(tuple(r[2:4]) for r in records if r[0] == "end")
  batches = drill_worker.STEPS // 4  # two mini-batches, two iterations
  trained = {(batch, prompt) for batch in range(batches) for prompt in range(4)}
  assert trained <= ends.keys(), sorted(trained - ends.keys())
  assert set(ends.values()) == {1}, ends.most_common(3)


def drill(cases: Any, kills: int, folder: pathlib.Path, seed: int = 0) -> list[Case]:
  """Spreads kills over cases; raises AssertionError at the first differing byte."""
  out = []
  for number, (job, count) in enumerate(cases):
    share = kills * (number + 1) // len(cases) - kills * number // len(cases)
    case = Case(job, count, folder / f"{job}-{count}", seed)
    try:
      case.run(share)
    finally:
      case.close()
    print(
      f"{job:12} {count} process(es): {case.kills} kills in {case.runs} runs, "
      "0 bytes differ",
      flush=True,
    )
    out.append(case)
  return out


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--kills", type=int, default=100)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=JOBS)
  parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
  options = parser.parse_args()
  cases = [(job, count) for count in options.processes for job in options.jobs]
  with tempfile.TemporaryDirectory() as folder:
    done = drill(cases, options.kills, pathlib.Path(folder), options.seed)
  print(f"{sum(case.kills for case in done)} kills, 0 bytes differ")


if __name__ == "__main__":
  main()
