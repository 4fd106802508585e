import os
import signal
import subprocess
import sys
import time

import psutil

from tunix.utils import processes

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
print(child.pid, flush=True)
time.sleep(3600)
"""


def start(code):
  return subprocess.Popen(
    [sys.executable, "-c", code],
    stdout=subprocess.PIPE,
    text=True,
    start_new_session=True,
  )


def wait_until(condition):
  while not condition():
    time.sleep(0.01)


def is_gone(pid):
  if not psutil.pid_exists(pid):
    return True
  return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_process_is_killed_with_what_it_started():
  parent = start(PARENT)
  with parent.stdout:
    child = int(parent.stdout.readline())
  assert not processes.has_ended(parent)
  assert processes.kill_group(parent) == -signal.SIGKILL
  assert processes.has_ended(parent)
  wait_until(lambda: is_gone(child))
  assert processes.kill_group(parent) == -signal.SIGKILL


def test_what_a_dead_process_started_is_killed_too():
  parent = start(PARENT)
  with parent.stdout:
    child = int(parent.stdout.readline())
  os.kill(parent.pid, signal.SIGTERM)
  wait_until(lambda: processes.has_ended(parent))
  assert psutil.pid_exists(parent.pid)  # its id is not given away
  assert not is_gone(child)
  assert processes.kill_group(parent) == -signal.SIGTERM
  wait_until(lambda: is_gone(child))


def test_exit_codes():
  ended = start("import sys; sys.exit(3)")
  ended.stdout.close()
  wait_until(lambda: processes.has_ended(ended))
  assert processes.kill_group(ended) == 3


def test_a_process_that_another_thread_has_just_waited_for_has_ended():
  process = start("")
  os.waitpid(process.pid, 0)  # as another thread does before it sets `returncode`
  assert process.returncode is None and processes.has_ended(process)
