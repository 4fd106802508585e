"""Rows of numbers on disk, found by a digest of the content they were computed from.

The rows are in files `rows-*.npy` of one folder. A file is written whole or not at all,
is named by a digest of its keys, and never changes. A writer that was killed can
therefore continue, and several processes may fill one folder. Files are memory-mapped
when they are read, at most 64 at a time, because each map keeps its file open. Only the
keys are held in memory.
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

_MAX_MAPPED = 64  # files mapped at a time


def row_key(parts: Iterable[bytes]) -> str:
  """Returns a digest of the content that a row is computed from: 128 bits, in hex."""
  digest = hashlib.blake2b(digest_size=16)
  for part in parts:
    digest.update(part)
  return digest.hexdigest()


def without_blanks(images: np.ndarray) -> np.ndarray:
  """Returns the images of a row without the blank ones at its end, which are padding.

  Digests of rows then do not depend on the padding. Digests have the tokens of the row
  too, which tell an image whose pixels are all 0 from padding.
  """
  used = np.flatnonzero(images.reshape(len(images), -1).any(axis=1))
  return images[: 1 + int(used[-1]) if len(used) else 0]


class RowStore:
  """The rows of one folder.

  Args:
    folder: folder of the files; created with the first file.

  Raises:
    ValueError: a file is damaged.
  """

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    self._places: dict[str, tuple[int, int]] = {}  # key -> (file number, row)
    self._files: list[pathlib.Path | np.ndarray] = []
    self._mapped = functools.lru_cache(_MAX_MAPPED)(_map)
    sweep(folder)
    for path in sorted(folder.glob("rows-*.npy")):
      self._open(path)

  def __len__(self) -> int:
    return len(self._places)

  def __contains__(self, key: str) -> bool:
    return key in self._places

  def take(self, keys: Sequence[str], column: str) -> np.ndarray:
    """Returns one column of the rows with these keys, stacked.

    Raises:
      KeyError: a key has no row.
    """
    places = [self._places[key] for key in keys]
    # Copies, because a view would keep its file open.
    rows = [self._rows(self._files[f])[row][column].copy() for f, row in places]
    return np.stack(rows)

  def add(self, columns: Mapping[str, np.ndarray], keys: Sequence[str]) -> None:
    """Writes new rows. All processes pass the same rows, and process 0 writes them.

    Args:
      columns: name -> array [N, ...].
      keys: N keys, see `row_key`.

    Raises:
      ValueError: a process does not see the file that process 0 has written.
      coordination.AbsentError: a process did not arrive.
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
    """Adds rows in memory only, for rows that a file of another format stores."""
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
  """Maps a file into memory; only the pages that are used are read from disk."""
  try:
    return np.load(path, mmap_mode="r")
  except (ValueError, OSError) as error:
    raise ValueError(
      f"{path} is damaged ({error}); delete it, and fill the folder again (several "
      "processes need a folder that all of them see)"
    ) from error


def _table(columns: Mapping[str, np.ndarray], keys: Sequence[str]) -> np.ndarray:
  """Joins the columns to one structured array, which one mapped file can hold."""
  fields = {"key": np.asarray(keys, "S32"), **columns}
  dtypes = [(name, x.dtype, x.shape[1:]) for name, x in fields.items()]
  rows = np.empty(len(keys), dtypes)
  for name, column in fields.items():
    rows[name] = column
  return rows
