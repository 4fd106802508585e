"""Atomic writing of files: a file is complete or does not exist."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import secrets
import shutil
import socket
from collections.abc import Iterable

# Name of an unfinished file: its final name, host and process id, a random number.
_UNFINISHED = re.compile(r".+\.(?P<host>[^.]+)-(?P<pid>\d+)-[0-9a-f]{8}\.partial")


def write_atomic(path: str | os.PathLike[str], data: bytes | Iterable[bytes]) -> None:
  """Writes a file under a temporary name, syncs it, and renames it into place.

  Args:
    path: the file.
    data: its bytes, or their parts in order.

  Raises:
    OSError: the disk is full or not writable. An old file is unchanged.
  """
  target = pathlib.Path(path)
  target.parent.mkdir(parents=True, exist_ok=True)
  temporary = target.parent / unfinished(target.name)
  try:
    with temporary.open("xb") as file:
      for part in [data] if isinstance(data, bytes) else data:
        file.write(part)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, target)
  except BaseException:
    temporary.unlink(missing_ok=True)
    raise


def sync_folder(folder: str | os.PathLike[str]) -> None:
  """Waits until the disk has the names of the files in a folder."""
  handle = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)


def unfinished(name: str) -> str:
  """Returns the temporary name of a file that will be called `name`.

  `sweep` recognizes the writing process by it. The name stays below the 255 bytes that
  file systems allow.
  """
  return f".{name[:160]}.{_host()}-{os.getpid()}-{secrets.token_hex(4)}.partial"


def sweep(folder: str | os.PathLike[str]) -> None:
  """Removes unfinished files of killed processes in a folder and its subfolders.

  Files of running processes and of other machines stay.
  """
  # Other than glob, walk passes over a folder that another process has just removed.
  walk = list(os.walk(folder))
  for path in (
    pathlib.Path(at, x) for at, *names in walk for part in names for x in part
  ):
    writer = _UNFINISHED.fullmatch(path.name)
    if writer is None or writer["host"] != _host() or _lives(int(writer["pid"])):
      continue
    if path.is_dir():
      shutil.rmtree(path, ignore_errors=True)
    else:
      with contextlib.suppress(OSError):  # another one may sweep as well
        path.unlink()


def _host() -> str:
  return re.sub(r"[^A-Za-z0-9_]", "_", socket.gethostname())[:40]


def _lives(pid: int) -> bool:
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  except PermissionError:
    pass  # the process exists and belongs to another user
  return True


def write_json(path: str | os.PathLike[str], value: object) -> None:
  """Writes `value` as indented JSON, atomically."""
  write_atomic(path, (json.dumps(value, indent=2, sort_keys=False) + "\n").encode())
