"""Real faults in real processes.

No test looks at a clock: a pool that failed to bound a fault would hang, and the
functions that hang would do so for an hour.
"""

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from tests.rl import reward_faults
from tunix.rl.reward.outcomes import Failed, TimedOut, Value, per_row
from tunix.rl.reward.pool import Call, RewardPool
from tunix.sandbox import child, child_main

ROWS = {"prompts": ["p", "q"], "completions": ["a", "bb"]}
FINE = [Value(1.0), Value(2.0)]
# Long enough for a call on a busy machine, short enough to wait for.
TIMEOUT_S = 1.5


def pool(*functions, workers=1, timeout_s=30.0, **options):
  return RewardPool(functions, workers=workers, timeout_s=timeout_s, **options)


def run_and_recover(fault, **options):
  """The outcomes of a call that goes wrong; the next one must be fine."""
  both = pool(fault, reward_faults.lengths, **options)
  bad, good = both.run([Call(0, ROWS, 2), Call(1, ROWS, 2)])
  assert good == FINE
  assert both.run([Call(1, ROWS, 2)]) == [FINE]
  both.close()
  return bad


@pytest.mark.parametrize(
  "fault", [reward_faults.hang, reward_faults.busy_in_c, reward_faults.refuses_to_die]
)
def test_what_hangs_is_killed_at_the_deadline(fault):
  assert run_and_recover(fault, timeout_s=TIMEOUT_S) == [TimedOut(TIMEOUT_S)] * 2


@pytest.mark.parametrize(
  ("fault", "message"),
  [
    (reward_faults.raises, r"ValueError: no such answer \(reward_faults.py:\d+\)"),
    (reward_faults.exits, "SystemExit: 3"),
    (reward_faults.leaves, "its process ended with exit code 7"),
    (reward_faults.forks_and_leaves, "its process ended with exit code 0"),
    (reward_faults.closes_everything, "closed the connection without an answer"),
    (reward_faults.floods, "answered 18446744073709551615 bytes"),
    (reward_faults.write_answer_twice, "unexpected answer"),
    (reward_faults.unpicklable_result, "returned a function as the row's reward"),
  ],
)
def test_what_goes_wrong_is_named(fault, message):
  first, second = run_and_recover(fault)
  assert isinstance(first, Failed) and first == second
  assert re.search(message, first.error)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps the limit")
def test_memory_is_limited():
  outcomes = run_and_recover(reward_faults.eats_memory, memory_bytes=1 << 28)
  assert all(o.error.startswith("MemoryError") for o in outcomes)
  free = pool(reward_faults.eats_a_little)
  limited = pool(reward_faults.eats_a_little, memory_bytes=1 << 24)
  assert free.run([Call(0, ROWS, 2)]) == [[Value(1 << 26)] * 2]
  assert isinstance(limited.run([Call(0, ROWS, 2)])[0][0], Failed)


def test_a_worker_killed_from_outside_is_named_and_replaced():
  victim = pool(reward_faults.hang, reward_faults.lengths)
  assert victim.run([Call(1, ROWS, 2)]) == [FINE]
  first = victim.pids()
  threading.Timer(0.3, os.kill, (first[0], signal.SIGKILL)).start()
  (outcomes,) = victim.run([Call(0, ROWS, 2)])
  assert outcomes == [Failed(outcomes[0].error)] * 2
  assert "ended by SIGKILL" in outcomes[0].error
  assert victim.run([Call(1, ROWS, 2)]) == [FINE]
  assert victim.pids() != first


def test_an_idle_worker_that_was_killed_costs_nothing():
  victim = pool(reward_faults.lengths)
  victim.run([Call(0, ROWS, 2)])
  worker = psutil.Process(victim.pids()[0])
  worker.kill()
  while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
    time.sleep(0.01)
  assert victim.run([Call(0, ROWS, 2)]) == [FINE]


def test_what_a_function_started_is_killed_with_it(tmp_path):
  file = tmp_path / "pid"
  rows = ROWS | {"pid_file": [str(file)] * 2}
  outcomes = pool(reward_faults.starts_a_child_and_hangs, timeout_s=TIMEOUT_S).run(
    [Call(0, rows, 2)]
  )
  assert outcomes == [[TimedOut(TIMEOUT_S)] * 2]
  child = int(file.read_text())
  while psutil.pid_exists(child):  # init reaps it
    if psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
      break
    time.sleep(0.01)


def test_outcomes_do_not_depend_on_the_number_of_workers():
  rows = per_row(reward_faults.hang_on_h)
  texts = ["a", "h", "b", "c", "h", "d"]
  calls = [Call(0, {"prompts": ["p"], "completions": [t]}, 1) for t in texts]
  expected = [[TimedOut(TIMEOUT_S)] if t == "h" else [Value(1.0)] for t in texts]
  for workers in (1, 3):
    assert pool(rows, workers=workers, timeout_s=TIMEOUT_S).run(calls) == expected


def test_several_workers_are_several_processes():
  many = pool(reward_faults.own_pid_after_a_while, workers=2)
  calls = [Call(0, {"prompts": ["p"], "completions": ["c"]}, 1)] * 8
  seen = set()
  for _ in range(100):  # the second may take a while to start
    seen |= {outcome[0].value for outcome in many.run(calls)}
    if len(seen) == 2:
      break
  assert seen == set(many.pids())


def test_large_columns_arrive():
  large = {"prompts": ["p"], "completions": ["x" * 5_000_000]}
  assert pool(reward_faults.lengths).run([Call(0, large, 1)]) == [[Value(5e6)]]


def test_workers_stay_away_from_the_accelerators():
  assert pool(reward_faults.platform).run([Call(0, ROWS, 2)]) == [[Value(1.0)] * 2]


def test_close_ends_the_processes_and_run_starts_new_ones():
  lengths = pool(reward_faults.lengths)
  assert lengths.pids() == []
  lengths.run([Call(0, ROWS, 2)])
  (pid,) = lengths.pids()
  lengths.close()
  assert not psutil.pid_exists(pid)
  assert lengths.run([Call(0, ROWS, 2)]) == [FINE]


def test_an_interrupted_run_leaves_no_process():
  hanging = pool(reward_faults.hang, timeout_s=3600)
  threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
  with pytest.raises(KeyboardInterrupt):
    hanging.run([Call(0, ROWS, 2)])
  assert hanging.pids() == []


def test_functions_that_cannot_be_sent_are_refused():
  with pytest.raises(TypeError, match=r"<lambda> cannot be sent.*workers=0"):
    pool(lambda prompts, completions: [1.0])


def test_functions_that_cannot_be_loaded_end_the_run():
  with pytest.raises(
    RuntimeError, match=r"cannot load unloadable: ValueError: no such"
  ):
    pool(reward_faults.Unloadable()).run([Call(0, ROWS, 2)])


def test_a_worker_that_is_killed_while_it_starts_gets_another_try(tmp_path):
  def killed(times):
    function = reward_faults.killed_until
    return reward_faults.Unloadable(function, str(tmp_path / str(times)), times + 1)

  assert pool(killed(2)).run([Call(0, ROWS, 2)]) == [FINE]
  with pytest.raises(RuntimeError, match="its process was ended by SIGKILL"):
    pool(killed(5)).run([Call(0, ROWS, 2)])
  assert len((tmp_path / "5").read_text()) == 3


def test_functions_that_take_for_ever_to_load_end_the_run(monkeypatch):
  monkeypatch.setattr(child, "START_TIMEOUT_S", 2.0)
  with pytest.raises(RuntimeError, match="it was not ready after 2 s"):
    pool(reward_faults.Unloadable(reward_faults.hang)).run([Call(0, ROWS, 2)])


def test_columns_that_cannot_be_sent_are_refused():
  rows = ROWS | {"lock": [threading.Lock()] * 2}
  with pytest.raises(TypeError, match="columns of lengths cannot be sent"):
    pool(reward_faults.lengths).run([Call(0, rows, 2)])


def test_columns_that_cannot_be_loaded_are_a_failure():
  rows = ROWS | {"score": [reward_faults.Unloadable()] * 2}
  ((outcome, _),) = pool(reward_faults.echo).run([Call(0, rows, 2)])
  assert "cannot be loaded in a worker: ValueError: no such" in outcome.error


SCRIPT = """
from tunix.rl.reward.pool import Call, RewardPool

def twice(prompts, completions):
  return [2.0 * len(c) for c in completions]

def work():
  pool = RewardPool([twice], workers=1, timeout_s=60.0)
  print(pool.run([Call(0, {"prompts": ["p"], "completions": ["abc"]}, 1)]))
"""


@pytest.mark.parametrize("as_module", [False, True])
def test_functions_of_a_script_are_found(tmp_path, as_module):
  (tmp_path / "script.py").write_text(SCRIPT + "if __name__ == '__main__': work()\n")
  argv = ["-m", "script"] if as_module else ["script.py"]
  done = run_python(argv, tmp_path)
  assert done.stdout.strip() == "[[Value(value=6.0)]]", done.stderr


def test_a_script_without_a_guard_is_told(tmp_path):
  (tmp_path / "script.py").write_text(SCRIPT + "work()\n")
  done = run_python(["script.py"], tmp_path)
  assert done.returncode == 1
  assert "under `if __name__ == '__main__':`" in done.stderr


def test_functions_of_an_interactive_session_are_refused(tmp_path):
  done = run_python(["-c", SCRIPT + "work()"], tmp_path)
  assert "twice cannot be sent to a worker: it is defined in an inter" in done.stderr


@pytest.mark.slow
@pytest.mark.ci
def test_a_worker_does_not_outlive_its_trainer(tmp_path):
  """Its own alarm ends it, though its function hangs."""
  code = f"""
    import os, threading
    from tests.rl import reward_faults
    from tunix.rl.reward import pool as reward_pool
    pool = reward_pool.RewardPool([reward_faults.hang], workers=1, timeout_s=0.5)
    # The trainer dies in the middle of the call, before its deadline.
    def die():
      while not pool.pids(): pass
      print(pool.pids()[0], flush=True)
      threading.Event().wait(0.3)
      os.kill(os.getpid(), 9)
    threading.Thread(target=die).start()
    pool.run([reward_pool.Call(0, {ROWS!r}, 2)])
  """
  done = run_python(["-c", textwrap.dedent(code)], tmp_path)
  assert done.returncode == -signal.SIGKILL
  worker = int(done.stdout)
  seconds = 0.5 + child_main.GRACE_S
  assert psutil.wait_procs([psutil.Process(worker)], timeout=4 * seconds)[1] == []


def run_python(argv, folder):
  path = os.pathsep.join([str(folder), *sys.path])
  return subprocess.run(
    [sys.executable, *argv],
    cwd=folder,
    env={**os.environ, "PYTHONPATH": path},
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
