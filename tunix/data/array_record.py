"""ArrayRecord files whose records are JSON objects."""

from __future__ import annotations

import functools
import glob
import hashlib
import pathlib
from typing import Any

import grain

from tunix.data import jsonl
from tunix.data.records import SFT, Kind
from tunix.data.stored import Records


class ArrayRecords(Records):
  """The records of one or more ArrayRecord files, each the UTF-8 text of a JSON object.

  Read by position through Grain, which holds the files' indices and no record.
  """

  noun = "ArrayRecord"

  def __init__(self, pattern: str, kind: Kind = SFT, *, name: str | None = None):
    """Opens the files.

    Args:
      pattern: a file, or one for `glob` (shards, in the order of their names).
      kind: what the records are.
      name: of the files in messages; None: the pattern.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: there is no record, or a file is damaged.
    """
    place = str(pathlib.Path(pattern).expanduser())
    self._files = sorted(glob.glob(place)) or [place]
    if missing := [file for file in self._files if not pathlib.Path(file).is_file()]:
      raise FileNotFoundError(
        f"data file {missing[0]!r}: no such file; give an ArrayRecord file, or a "
        "pattern of them in quotes"
      )
    self.kind, self.name = kind, pattern if name is None else name
    try:
      self._source = grain.sources.ArrayRecordDataSource(self._files)
    except (RuntimeError, ValueError) as error:
      raise ValueError(f"{self.name} cannot be read as ArrayRecord: {error}") from error
    if not len(self):
      raise ValueError(f"{self.name} is empty; {kind.expected}, one JSON object each")

  def __len__(self) -> int:
    return self._source.__len__()  # pyright: ignore[reportAttributeAccessIssue]

  def where(self, index: int) -> str:
    """The place of a record: the name, and its number from 0 over all files."""
    return f"{self.name}, record {index}"

  def raw(self, index: int) -> Any:
    """See the base class."""
    return jsonl.parsed(self._source[index], self.where(index), self.kind, "a record")

  @functools.cached_property
  def fingerprint(self) -> str:
    """SHA-256 of the files' bytes, in order."""
    digest = hashlib.sha256()
    for file in self._files:
      with pathlib.Path(file).open("rb") as opened:
        digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()
