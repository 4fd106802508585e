"""RL runs that are killed at awkward moments end with the bytes of an untouched run."""

import random
import signal
import sys
import time
import zlib

import pytest

from tests import drills
from tests.rl import drill_worker, kill_matrix
from tests.rl.reward import judge_server
from tests.rl.rollout.hosts import HostProcess
from tunix.rl.reward.judge import Judge
from tunix.rl.schedules import journal


@pytest.mark.slow
@pytest.mark.parametrize(
  ("job", "kills"),
  [
    pytest.param("grpo", 8),
    pytest.param("ppo", 8),
    pytest.param("grpo-lora", 1, marks=pytest.mark.ci),
    ("grpo-recurrent", 1),
    ("dapo", 2),
    ("lagged", 2),
    ("lagged-env", 2),
  ],
)
def test_killed_runs_resume_exactly(tmp_path, job, kills):
  drill = drills.KillDrill(
    command=lambda folder: [
      *(sys.executable, "-m", "tests.rl.drill_worker"),
      *(job, str(folder)),
    ]
  )
  drill.check(tmp_path, random_kills=kills)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("job", "kills"),
  [
    pytest.param("greedy-env", 2, marks=pytest.mark.ci),
    ("greedy", 5),
    ("greedy-env-hosts", 4),
  ],
)
def test_killed_greedy_runs_lose_nothing_and_are_replayed(
  tmp_path, job, kills, monkeypatch, request
):
  host = None
  if job.endswith("-hosts"):
    host = HostProcess(tmp_path / "programs")
    request.addfinalizer(host.stop)
    monkeypatch.setenv(drill_worker.HOSTS, host.url)
  command = [sys.executable, "-m", "tests.rl.drill_worker", job]
  drill = drills.KillDrill(command=lambda folder: [*command, str(folder)])
  folder, dice = tmp_path / "run", random.Random(len(job))
  file = folder / "checkpoints" / journal.FOLDER / journal.DECISIONS
  for kill in range(kills):
    if host is not None and kill == 2:
      killed_host_at(drill.start(folder), file, dice.randrange(20, 900), host)
    elif kill == 1:
      assert drill.interrupt(folder, after_saves=1, in_save=True)
    else:
      kill_at(drill.start(folder), file, dice.randrange(20, 900))
  drill.finish(folder)
  kill_matrix.check_journal(folder)
  drill.finish(tmp_path / "replay_run", fork=False)
  assert drill.digest(tmp_path / "replay_run") == drill.digest(folder)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, 8])
def test_killed_runs_ask_a_judge_nothing_twice(tmp_path, kills, monkeypatch):
  """A judge that is asked again changes its mind, and then the bytes would differ."""
  dice, kept = random.Random(kills), set()

  def verdict(question, _):
    score = zlib.crc32(question.encode()) % 10 + 1
    time.sleep(0.002)  # so that kills come between the answers of a batch
    return f"Verdict: {11 - score if question in kept else score}"

  with judge_server.serving(verdict) as server:
    monkeypatch.setenv("TUNIX_JUDGE_URL", server.url)
    command = [sys.executable, "-m", "tests.rl.drill_worker", "judged"]
    drill = drills.KillDrill(command=lambda folder: [*command, str(folder)])
    drill.finish(tmp_path / "whole", fork=False)
    left, runs = kills, 0
    while left:  # a run may end before it was killed so many times
      folder, runs = tmp_path / f"cut{runs}", runs + 1
      kept.clear()
      while left and drill.interrupt(
        folder, after_saves=1, delay=dice.uniform(0.0, 0.7)
      ):
        left -= 1
        files = {"model": "m", "cache": str(folder / "judges")}
        judge = Judge(str(folder / "judge.txt"), **files)
        kept |= {q for q in server.questions if judge.asker._kept.get(q)}
      asked = len(server.questions)
      drill.finish(folder)
      assert kept.isdisjoint(server.questions[asked:])
      assert drill.digest(folder) == drill.digest(tmp_path / "whole")


@pytest.mark.slow
def test_killed_runs_of_two_processes_resume_exactly(tmp_path):
  (case,) = kill_matrix.drill([("lagged-env", 2)], kills=2, folder=tmp_path)
  assert case.kills == 2


def kill_at(run, file, more):
  """Kills a run when its journal has grown by some bytes, in the middle of a step."""
  wait_for(run, file, more)
  run.kill()
  output, _ = run.communicate(timeout=60)
  assert run.returncode == -signal.SIGKILL, output


def killed_host_at(run, file, more, host):
  """Kills the host of a run in the middle of a step, and the run after that."""
  wait_for(run, file, more)
  host.restart()
  kill_at(run, file, 300)


def wait_for(run, file, more):
  """Waits until the journal of a run has grown by some bytes."""
  size = lambda: file.stat().st_size if file.exists() else 0
  end, until = size() + more, time.monotonic() + drills.DEADLINE_SECONDS
  while size() < end and run.poll() is None:
    assert time.monotonic() < until, "the journal did not grow"
    time.sleep(0.002)
