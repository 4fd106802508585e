"""The lock of a folder: one process at a time trains in it, or serves it.

Two processes would write to the same metrics file, checkpoints or journals. The system
holds the lock and releases it when the process ends for whatever reason. The file
`.lock` stays and means nothing by itself; it holds the process id for error messages.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
from collections.abc import Callable, Iterator

import filelock

NAME = ".lock"

# Seconds to wait for the lock: `check` of another process holds it for a moment.
_PATIENCE_S = 0.5
# Errors of file systems without locks (some network mounts), where nothing is locked.
_UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


def check(
  folder: pathlib.Path, task: str = "training in", key: str = "output_dir"
) -> None:
  """Refuses a folder that another process uses; changes nothing.

  Args:
    folder: the folder.
    task: what the process does with the folder, for the message of the error.
    key: name of the setting of the folder, for the same message.

  Raises:
    RuntimeError: another process holds the lock.
  """
  if (folder / NAME).is_file():
    # OSError passes: a folder that cannot be written may hold a finished run.
    with contextlib.suppress(OSError):
      _acquired(folder, task, key).release()


@contextlib.contextmanager
def hold(
  folder: pathlib.Path, task: str = "training in", key: str = "output_dir"
) -> Iterator[None]:
  """Holds the lock of a folder during a `with` block; creates the folder if needed.

  Args:
    folder, task, key: see `check`.

  Raises:
    RuntimeError: another process holds it.
    OSError: the folder cannot be written.
  """
  folder.mkdir(parents=True, exist_ok=True)
  lock = _acquired(folder, task, key, _sign)
  try:
    yield
  finally:
    lock.release()


def _acquired(
  folder: pathlib.Path,
  task: str,
  key: str,
  on_acquired: Callable[[int], None] | None = None,
) -> filelock.BaseFileLock:
  # No soft lock where the file system has none: it would outlive a killed process.
  lock = filelock.FileLock(
    folder / NAME, _PATIENCE_S, fallback_to_soft=False, on_acquired=on_acquired
  )
  try:
    lock.acquire()
  except filelock.Timeout as error:
    raise RuntimeError(
      f"{_holder(folder)} is {task} {folder}: wait for it or stop it, or use "
      f"another {key}"
    ) from error
  except OSError as error:
    if error.errno not in _UNSUPPORTED:
      raise
  return lock


def _sign(descriptor: int) -> None:
  os.ftruncate(descriptor, 0)
  os.write(descriptor, f"{os.getpid()}\n".encode())


def _holder(folder: pathlib.Path) -> str:
  try:
    pid = (folder / NAME).read_text(errors="replace").strip()
  except OSError:  # Windows does not allow reading a locked file
    pid = ""
  return f"process {pid}" if pid else "another process"
