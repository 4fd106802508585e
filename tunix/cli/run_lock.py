"""One process at a time in a run's folder.

Two would write to the same metrics file and checkpoints. The lock is the operating
system's (flock), so it ends with its process, however that ends; the file `.lock`
stays and means nothing by itself.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.util
import os
import pathlib
from collections.abc import Iterator
from typing import Any

NAME = ".lock"

# Windows has no fcntl: there the folder is not locked.
_fcntl: Any = (
  importlib.import_module("fcntl") if importlib.util.find_spec("fcntl") else None
)
# Of file systems that cannot lock (some network mounts).
_UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


def check(folder: pathlib.Path) -> None:
  """Says at once that another process is at work there; changes nothing.

  Raises:
    RuntimeError: another process holds the lock.
  """
  file = folder / NAME
  if _fcntl is None or not file.is_file():
    return
  # Only a look: a folder that cannot be written may hold a finished run.
  with contextlib.suppress(OSError), file.open("r+b") as handle:
    _lock(handle, folder, shared=True)


@contextlib.contextmanager
def hold(folder: pathlib.Path) -> Iterator[None]:
  """Holds the lock of a folder, which is made if it is not there.

  Raises:
    RuntimeError: another process holds it.
    OSError: the folder cannot be written.
  """
  if _fcntl is None:
    yield
    return
  folder.mkdir(parents=True, exist_ok=True)
  # Not "w": that would empty the file of a holder.
  handle = os.fdopen(os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
  with handle:
    _lock(handle, folder, shared=False)
    handle.truncate(0)
    handle.write(f"{os.getpid()}\n".encode())
    handle.flush()
    yield


def _lock(handle: Any, folder: pathlib.Path, *, shared: bool) -> None:
  kind = _fcntl.LOCK_SH if shared else _fcntl.LOCK_EX
  try:
    _fcntl.flock(handle, kind | _fcntl.LOCK_NB)
  except BlockingIOError as error:
    pid = handle.read().decode(errors="replace").strip()
    who = f"process {pid}" if pid else "another process"
    raise RuntimeError(
      f"{who} is training in {folder}: wait for it or stop it, or use another "
      "output_dir"
    ) from error
  except OSError as error:
    if error.errno not in _UNSUPPORTED:
      raise
