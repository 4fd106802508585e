"""A run of the command, killed at every kind of change that it makes to its files."""

import collections
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from tests import drills

# Whose bytes are not the run's: times (drawn in the page as well), and the number of
# the process.
_OWN_BYTES = ("timings.jsonl", ".lock", "report.html")
_CHECKPOINTS = "out/checkpoints"

Kind = tuple[str, str, str]  # when, event, path: see tests/kill_server.py


@dataclasses.dataclass(frozen=True)
class Task:
  """A run for tests/kill_server.py.

  Attributes:
    argv: of the command.
    root: the folder below which changes count.
    log: file of the moments that there were, one a line.
    output: file of what the run prints.
    kill, number: the moment to end it at: its kind, and how many to let pass.
    after_s: seconds after which it is killed, wherever it is; None: never.
  """

  argv: list[str]
  root: str
  log: str
  output: str
  kill: Kind | None = None
  number: int = 0
  after_s: float | None = None


class KillPlan:
  """Kills a run before, after and in the midst of each kind of change to its files, or
  at random instants.

  Args:
    argv: of the command, which writes below `root` alone: into `root/out`, and what it
      keeps besides.
    root: not there yet.
    skip: pattern of paths (as `_kind` of tests/kill_server.py writes them) that are not
      killed at.
    most: kinds to kill at, drawn by `seed`; None: all.
  """

  def __init__(
    self,
    argv: list[str],
    root: pathlib.Path,
    *,
    skip: str | None = None,
    most: int | None = None,
    seed: int = 0,
  ):
    self.argv, self.root, self.skip, self.most = argv, root, skip, most
    self.dice = random.Random(seed)
    self.output = root.with_suffix(".output")
    self.log = root.with_suffix(".log")

  def check(self) -> int:
    """The whole plan; returns how many kills there were.

    Raises:
      AssertionError: names the moments after which something was different.
    """
    wrong: dict[str, str] = {}
    kills = 0
    with self._server() as server:
      assert self._run(server) == 0, self.output.read_text()
      want, kinds = self._found(), self._kinds()
      for kind, count in kinds.items():
        # A kind of very many files is more than one kind.
        for number in self.dice.sample(range(count), 1 + count // 25):
          kills += 1
          if problem := self._case(server, kind, number, want):
            wrong[f"{' '.join(kind)} [{number} of {count}]"] = problem
    told = "\n".join(f"{k}: {v}" for k, v in wrong.items())
    assert not wrong, f"{len(wrong)} of {kills}:\n{told}"
    return kills

  def check_instants(self, rounds: int, kills: int = 2) -> None:
    """Kills the run at random instants, `kills` times before it may end.

    Args:
      rounds: times that the run is begun in a new folder.
      kills: most kills in a folder; fewer where a start reaches the end.

    Raises:
      AssertionError: names the instants after which something was different.
    """
    wrong: dict[str, str] = {}
    with self._server() as server:
      assert self._run(server) == 0, self.output.read_text()
      shutil.rmtree(self.root)
      begun = time.monotonic()
      assert self._run(server) == 0, self.output.read_text()
      seconds, want = time.monotonic() - begun, self._found()  # of compiled programs
      for _ in range(rounds):
        instants: list[float] = []
        shutil.rmtree(self.root)
        for _ in range(kills):
          after_s = self.dice.uniform(0.1, 1.0) * seconds
          while (code := self._run(server, after_s=after_s)) == 0 and not instants:
            after_s /= 2  # the machine was busier when the time was taken
            shutil.rmtree(self.root)
          if code == 0:
            break
          assert code == -signal.SIGKILL, (instants, code, self.output.read_text())
          instants.append(round(after_s, 3))
        if problem := self._problem(server, want):
          wrong[f"killed after {instants} s of {seconds:.1f}"] = problem
    told = "\n".join(f"{k}: {v}" for k, v in wrong.items())
    assert not wrong, f"{len(wrong)} of {rounds}:\n{told}"

  def _case(
    self, server: subprocess.Popen, kind: Kind, number: int, want: dict[str, str]
  ) -> str:
    """What is wrong after a kill and a second start; empty: nothing."""
    shutil.rmtree(self.root)
    while self._run(server, kind, number) != -signal.SIGKILL:
      # Threads of orbax do not write the same number of files every time.
      if not number:
        return f"the moment did not come: {self.output.read_text()[-500:]}"
      number //= 2
      shutil.rmtree(self.root)
    return self._problem(server, want)

  def _problem(self, server: subprocess.Popen, want: dict[str, str]) -> str:
    """What is wrong after the next start; empty: nothing."""
    if code := self._run(server):
      return f"the second start ended with {code}: {self.output.read_text()[-1500:]}"
    found = self._found()
    names = sorted(want.keys() | found.keys())
    return "; ".join(
      f"{name} is {'left' if name not in want else 'gone'}"
      if (name in want) != (name in found)
      else f"{name} differs"
      for name in names
      if want.get(name) != found.get(name)
    )

  def _kinds(self) -> dict[Kind, int]:
    """The kinds of moments of the last run, and how often each came."""
    lines = self.log.read_text().splitlines()
    kinds = collections.Counter(tuple(json.loads(line)) for line in lines)
    chosen = [k for k in kinds if self.skip is None or not re.search(self.skip, k[2])]
    if self.most is not None and len(chosen) > self.most:
      chosen = self.dice.sample(chosen, self.most)
    return {kind: kinds[kind] for kind in chosen}

  def _found(self) -> dict[str, str]:
    """Every file below the root, with its bytes where they are the run's."""
    found = {}
    for path in sorted(self.root.rglob("*")):
      name = path.relative_to(self.root).as_posix()
      if name.startswith(f"{_CHECKPOINTS}/") and name.count("/") > 3:
        continue  # orbax's own names
      # A start that saved nothing leaves its metrics aside, on purpose.
      if path.suffix.strip(".").isdigit() and path.parent.name == "logs":
        continue
      if path.is_dir() or path.name in _OWN_BYTES or name.startswith(_CHECKPOINTS):
        found[name] = ""
      else:
        found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    drill = drills.KillDrill(command=lambda _: [], files=())
    return found | drill.digest(self.root / "out")

  def _run(
    self,
    server: subprocess.Popen,
    kill: Kind | None = None,
    number: int = 0,
    after_s: float | None = None,
  ) -> int:
    root, log, output = map(str, (self.root, self.log, self.output))
    self.root.mkdir(exist_ok=True)
    task = Task(self.argv, root, log, output, kill, number, after_s)
    assert server.stdin and server.stdout
    server.stdin.write(json.dumps(dataclasses.asdict(task)) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, "the server ended"
    return int(answer)

  @contextlib.contextmanager
  def _server(self) -> Iterator[subprocess.Popen]:
    server = subprocess.Popen(
      [sys.executable, "-m", "tests.kill_server"],
      cwd=drills.ROOT,
      env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    try:
      yield server
    finally:
      server.kill()
      server.communicate()
