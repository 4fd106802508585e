"""Files that are either there whole or not at all."""

from __future__ import annotations

import json
import os
import pathlib
import tempfile
from typing import Any


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
  """Writes a file beside its name, syncs it, and renames it into place.

  Raises:
    OSError: the disk is full or not writable; the old file, if any, is untouched.
  """
  target = pathlib.Path(path)
  target.parent.mkdir(parents=True, exist_ok=True)
  handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name + ".")
  try:
    with os.fdopen(handle, "wb") as file:
      file.write(data)
      file.flush()
      os.fsync(file.fileno())
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(temporary, 0o666 & ~umask)
    os.replace(temporary, target)
  except BaseException:
    pathlib.Path(temporary).unlink(missing_ok=True)
    raise


def write_json(path: str | os.PathLike[str], value: Any) -> None:
  """`value` as indented JSON, atomically."""
  write_atomic(path, (json.dumps(value, indent=2, sort_keys=False) + "\n").encode())
