"""Processes that we start in a session of their own, and end with all they started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import Any


def has_ended(process: subprocess.Popen[Any]) -> bool:
  """Whether it has ended. It keeps its id until `kill_group`: unlike `poll`, this does
  not let the system give the id to another process."""
  if process.returncode is not None:
    return True
  flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
  return os.waitid(os.P_PID, process.pid, flags) is not None


def kill_group(process: subprocess.Popen[Any], wait_s: float = 5.0) -> int | None:
  """Kills a process started with `start_new_session=True`, dead or alive, and those
  that it started.

  Returns: its exit code; None if the system has not ended it within `wait_s` seconds.
  """
  if process.returncode is None:
    # Nobody has waited for it yet, so the id is still this group's.
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
      process.wait(wait_s)
  return process.returncode
