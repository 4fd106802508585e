"""ArrayRecord files whose records are JSON objects."""

from __future__ import annotations

import functools
import glob
import hashlib
import pathlib
from typing import Any

import grain

from tunix.data.reading import jsonl
from tunix.data.reading.stored import Records
from tunix.data.records import SFT, Kind


class ArrayRecords(Records):
  """Records of one or more ArrayRecord files, each the UTF-8 text of a JSON object.

  Grain reads records by position; memory holds the index of each file, but no record.
  """

  noun = "ArrayRecord"

  def __init__(self, pattern: str, kind: Kind = SFT, *, name: str | None = None):
    """Opens the files.

    Args:
      pattern: path of a file, or a `glob` pattern of shards, read in the order of their
        names.
      kind: kind of the records.
      name: name of the files in messages; None takes the pattern.

    Raises:
      FileNotFoundError: no file matches.
      ValueError: the files have no record, or one is damaged.
    """
    path = str(pathlib.Path(pattern).expanduser())
    self._files = sorted(glob.glob(path)) or [path]
    if missing := [file for file in self._files if not pathlib.Path(file).is_file()]:
      raise FileNotFoundError(
        f"data file {missing[0]!r}: no such file; give an ArrayRecord file, or a "
        "pattern of them in quotes"
      )
    self.kind, self.name = kind, pattern if name is None else name
    self.folder = pathlib.Path(self._files[0]).parent
    try:
      self._source = grain.sources.ArrayRecordDataSource(self._files)
    except (RuntimeError, ValueError) as error:
      raise ValueError(f"{self.name} cannot be read as ArrayRecord: {error}") from error
    if not len(self):
      raise ValueError(f"{self.name} is empty; {kind.expected}, one JSON object each")

  def __len__(self) -> int:
    return self._source.__len__()  # pyright: ignore[reportAttributeAccessIssue]

  def raw(self, index: int) -> Any:
    """Returns record `index`, counted over all files; raises as the base class does."""
    return jsonl.parsed(self._source[index], self.where(index), self.kind, "a record")

  @functools.cached_property
  def fingerprint(self) -> str:
    """SHA-256 of the digests of the files, in order, in hex."""
    digest = hashlib.sha256()
    for file in self._files:
      with pathlib.Path(file).open("rb") as opened:
        digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()
