"""Rows of numbers on disk, found by the content that they were computed from.

A folder of files `rows-*.npy`: each is there whole or not at all, is named by what it
holds and never changed, so that a writer that was killed goes on where it was and
several processes may fill one folder. Files are mapped when they are read, a few at a
time (each map holds its file open); memory holds the keys.
"""

from __future__ import annotations

import functools
import hashlib
import io
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np

from tunix.utils import coordination
from tunix.utils.io import sweep, write_atomic

_MAPPED = 64  # files at a time


def row_key(parts: Iterable[bytes]) -> str:
  """A name for a row by what it was computed from: 128 bits, in hex."""
  digest = hashlib.blake2b(digest_size=16)
  for part in parts:
    digest.update(part)
  return digest.hexdigest()


class RowStore:
  """The rows in a folder.

  Args:
    folder: of the files; made when the first is written.

  Raises:
    ValueError: a file is damaged.
  """

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    self._places: dict[str, tuple[int, int]] = {}  # key -> number of a file, row
    self._files: list[pathlib.Path | np.ndarray] = []
    self._mapped = functools.lru_cache(_MAPPED)(_map)
    sweep(folder)
    for path in sorted(folder.glob("rows-*.npy")):
      self._open(path)

  def __len__(self) -> int:
    return len(self._places)

  def __contains__(self, key: str) -> bool:
    return key in self._places

  def take(self, keys: Sequence[str], column: str) -> np.ndarray:
    """A column of the rows of these keys, stacked.

    Raises:
      KeyError: there is no such row.
    """
    places = [self._places[key] for key in keys]
    # Copies: a view would hold its file open.
    rows = [self._rows(self._files[f])[row][column].copy() for f, row in places]
    return np.stack(rows)

  def add(self, columns: Mapping[str, np.ndarray], keys: Sequence[str]) -> None:
    """Writes rows that are not there yet: arrays [N, ...] by name, and N keys. Of
    several processes every one gives the same rows; the first writes them.

    Raises:
      ValueError: a process does not see what the first has written.
      coordination.AbsentError: a process did not come.
    """
    rows = _table(columns, keys)
    np.save(buffer := io.BytesIO(), rows)
    digest = row_key([key.encode() for key in keys])
    path = self.folder / f"rows-{digest}.npy"
    if jax.process_index() == 0:
      write_atomic(path, buffer.getvalue())
    coordination.gather("rows on disk", None)
    self._open(path)

  def hold(self, columns: Mapping[str, np.ndarray], keys: Sequence[str]) -> None:
    """The same in memory alone: rows that a file of another form holds."""
    rows = _table(columns, keys)
    self._index(rows, rows)

  def _open(self, path: pathlib.Path) -> None:
    self._index(path, _map(path))

  def _index(self, file: pathlib.Path | np.ndarray, rows: np.ndarray) -> None:
    for row, key in enumerate(rows["key"]):
      self._places[key.decode()] = len(self._files), row
    self._files.append(file)

  def _rows(self, file: pathlib.Path | np.ndarray) -> np.ndarray:
    return file if isinstance(file, np.ndarray) else self._mapped(file)


def _map(path: pathlib.Path) -> np.ndarray:
  """The rows of a file, read where they are touched."""
  try:
    return np.load(path, mmap_mode="r")
  except (ValueError, OSError) as error:
    raise ValueError(
      f"{path} is damaged ({error}): delete it, and fill the folder again (several "
      "processes need a folder that all of them see)"
    ) from error


def _table(columns: Mapping[str, np.ndarray], keys: Sequence[str]) -> np.ndarray:
  """One structured array, because one file of it can be mapped."""
  together = {"key": np.asarray(keys, "S32"), **columns}
  kinds = [(name, x.dtype, x.shape[1:]) for name, x in together.items()]
  rows = np.empty(len(keys), kinds)
  for name, column in together.items():
    rows[name] = column
  return rows
