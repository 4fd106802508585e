"""One process at a time in a run's folder.

Two would write to the same metrics file and checkpoints. The lock is the operating
system's, so it ends with its process, however that ends; the file `.lock` stays and
means nothing by itself. What stands in it is the holder, for the others' message.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
from collections.abc import Callable, Iterator

import filelock

NAME = ".lock"

# The look of another process at the lock takes it for a moment, which is no holder.
_PATIENCE_S = 0.5
# Of file systems that cannot lock (some network mounts): there nothing is locked.
_UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


def check(folder: pathlib.Path) -> None:
  """Says at once that another process is at work there; changes nothing.

  Raises:
    RuntimeError: another process holds the lock.
  """
  if (folder / NAME).is_file():
    # Only a look: a folder that cannot be written may hold a finished run.
    with contextlib.suppress(OSError):
      _acquired(folder).release()


@contextlib.contextmanager
def hold(folder: pathlib.Path) -> Iterator[None]:
  """Holds the lock of a folder, which is made if it is not there.

  Raises:
    RuntimeError: another process holds it.
    OSError: the folder cannot be written.
  """
  folder.mkdir(parents=True, exist_ok=True)
  lock = _acquired(folder, _sign)
  try:
    yield
  finally:
    lock.release()


def _acquired(
  folder: pathlib.Path, on_acquired: Callable[[int], None] | None = None
) -> filelock.BaseFileLock:
  # No soft lock in place of a missing one: it would outlive a killed process.
  lock = filelock.FileLock(
    folder / NAME, _PATIENCE_S, fallback_to_soft=False, on_acquired=on_acquired
  )
  try:
    lock.acquire()
  except filelock.Timeout as error:
    raise RuntimeError(
      f"{_holder(folder)} is training in {folder}: wait for it or stop it, or use "
      "another output_dir"
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
  except OSError:  # Windows lets nobody read a locked file
    pid = ""
  return f"process {pid}" if pid else "another process"
