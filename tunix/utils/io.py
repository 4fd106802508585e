"""Files that are either there whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import secrets
import shutil
import socket
from typing import Any

# What is being written: its name, who writes it, a number of its own.
_UNFINISHED = re.compile(r".+\.(?P<host>[^.]+)-(?P<pid>\d+)-[0-9a-f]{8}\.partial")


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
  """Writes a file beside its name, syncs it, and renames it into place.

  Raises:
    OSError: the disk is full or not writable; the old file, if any, is untouched.
  """
  target = pathlib.Path(path)
  target.parent.mkdir(parents=True, exist_ok=True)
  temporary = target.parent / unfinished(target.name)
  try:
    with temporary.open("xb") as file:
      file.write(data)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, target)
  except BaseException:
    temporary.unlink(missing_ok=True)
    raise


def unfinished(name: str) -> str:
  """A name for what will be called `name` when it is whole; `sweep` knows whose it is.
  A name of the usual length stays within what file systems take."""
  return f".{name[:160]}.{_host()}-{os.getpid()}-{secrets.token_hex(4)}.partial"


def sweep(folder: str | os.PathLike[str]) -> None:
  """Removes what killed processes of this machine left in a folder and below.

  Files of processes that live, or of other machines, stay.
  """
  for path in list(pathlib.Path(folder).rglob("*.partial")):
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
    pass  # somebody else's
  return True


def write_json(path: str | os.PathLike[str], value: Any) -> None:
  """`value` as indented JSON, atomically."""
  write_atomic(path, (json.dumps(value, indent=2, sort_keys=False) + "\n").encode())
