"""SHA-256 of the files of a model folder, in the form of the program `sha256sum`.

The formats of weights have no checksums. If a folder holds `SHA256SUMS`, its files are
compared before they are loaded, so that no damaged file becomes other weights. The file
is written on request (`export.checksums`), or by `sha256sum * > SHA256SUMS`.
"""

from __future__ import annotations

import hashlib
import pathlib
import re

from tunix.utils import io

NAME = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def write(folder: pathlib.Path) -> None:
  """Writes the checksums of all files of a folder into it.

  Raises:
    OSError: a file cannot be read, or the disk is full or not writable.
  """
  names = sorted(str(x.relative_to(folder)) for x in folder.rglob("*") if x.is_file())
  lines = [f"{_sum(folder / name)}  {name}\n" for name in names if name != NAME]
  io.write_atomic(folder / NAME, "".join(lines).encode())


def check(folder: pathlib.Path) -> None:
  """Compares the files of a folder with its checksums, if it has any.

  Listed files that are missing are passed over: a copy may leave some out.

  Raises:
    ValueError: a file differs, or a line is no checksum with a name.
  """
  file = folder / NAME
  if not file.is_file():
    return
  for number, line in enumerate(file.read_text("utf-8").split("\n"), 1):
    read = _LINE.fullmatch(line)
    if line and not read:
      raise ValueError(
        f"{file}, line {number}: found {line[:80]!r}, expected 64 hexadecimal digits, "
        "two spaces and the name of a file. Write it with `sha256sum`, or delete it"
      )
    if read and (folder / read[2]).is_file() and _sum(folder / read[2]) != read[1]:
      raise ValueError(
        f"{folder / read[2]} is not the file that was written: its SHA-256 is not that "
        f"of {NAME}. Copy or export it again. If you changed it yourself, delete {file}"
      )


def _sum(file: pathlib.Path) -> str:
  with file.open("rb") as data:
    return hashlib.file_digest(data, "sha256").hexdigest()
