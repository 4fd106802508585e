"""SHA-256 of the files of a model folder, in the form of the program `sha256sum`.

The formats of weights have no checksums. If a folder holds `SHA256SUMS`, its files are
compared before they are loaded, so that no damaged file becomes other weights. The file
is written on request (`export.checksums`), or by `sha256sum * > SHA256SUMS`.
"""

from __future__ import annotations

import hashlib
import pathlib
import re

from tunix.utils import io, text_files

NAME = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def write(folder: pathlib.Path) -> None:
  """Writes the checksums of the files of a folder into it.

  Hidden files and folders, such as `.git`, are left out, as `sha256sum *` does.

  Raises:
    OSError: a file cannot be read, or the disk is full or not writable.
  """
  files = [x.relative_to(folder) for x in folder.rglob("*") if x.is_file()]
  shown = [x for x in files if not any(part.startswith(".") for part in x.parts)]
  names = sorted(str(x) for x in shown if str(x) != NAME)
  lines = [f"{_sum(folder / name)}  {name}\n" for name in names]
  io.write_atomic(folder / NAME, "".join(lines).encode())


def check(folder: pathlib.Path) -> None:
  """Compares the files of a folder with its checksums, if it has any.

  Listed files that are missing are passed over: a copy may leave some out. So is the
  list itself, which `sha256sum *` reads while it is written.

  Raises:
    ValueError: a file differs, or a line is no checksum with a name in the folder.
  """
  file = folder / NAME
  if not file.is_file():
    return
  for name, digest in _read(file):
    part = folder / name
    if part != file and part.is_file() and _sum(part) != digest:
      raise ValueError(
        f"{part} is not the file that was written: its SHA-256 is not that of {NAME}. "
        f"Copy or export it again. If you changed it yourself, delete {file}"
      )


def _read(file: pathlib.Path) -> dict[tuple[pathlib.PurePath, str], None]:
  """Returns the names and checksums of a list, each pair once, in order."""
  listed = {}
  for number, line in enumerate(text_files.lines(text_files.read(file)), 1):
    match = _LINE.fullmatch(line)
    name = pathlib.PurePath(match[2] if match else "..")
    # The list may be a stranger's, and must not make us read other files.
    if line and (name.is_absolute() or ".." in name.parts):
      raise ValueError(
        f"{file}, line {number}: found {line[:80]!r}, expected 64 hexadecimal digits, "
        "two spaces and the name of a file in this folder. Write it with `sha256sum`, "
        "or delete it"
      )
    if match:
      listed[name, match[1]] = None
  return listed


def _sum(file: pathlib.Path) -> str:
  with file.open("rb") as data:
    return hashlib.file_digest(data, "sha256").hexdigest()
