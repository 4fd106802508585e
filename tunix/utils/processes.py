"""Child processes in sessions of their own, which end together with their children."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import Any


def has_ended(process: subprocess.Popen[Any]) -> bool:
  """Returns True if a process has ended, without releasing its id.

  `poll` would let the system give the id to another process before `kill_group`.
  """
  if process.returncode is not None:
    return True
  flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
  try:
    return os.waitid(os.P_PID, process.pid, flags) is not None
  except ChildProcessError:  # another thread has just waited for it
    return True


def kill_group(process: subprocess.Popen[Any], wait_s: float = 5.0) -> int | None:
  """Kills a process started with `start_new_session=True`, and all its children.

  Args:
    process: the process, which may have ended already.
    wait_s: seconds to wait for its end.

  Returns: its exit code; None: it has not ended within `wait_s` seconds.
  """
  if process.returncode is None:
    # The id still belongs to this group, because nothing has waited for the process.
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
      process.wait(wait_s)
  return process.returncode
