"""Sparse inputs of losses, in compressed rows (CSR) as the SDK sends them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tunix.tinker.errors import TinkerError


class Sparse:
  """An array [N, K] of which only some values are listed; the others are 0.

  It stays sparse until its size is checked, because a short message can name a huge
  array. `np.asarray` makes the whole array.

  Args:
    values: the listed values, [L].
    starts: places in `values` where the N rows start, and L; int64 [N + 1].
    columns: columns of the values, int64 [L], ascending in each row.
    shape: [N, K].

  Raises:
    TinkerError: the arrays do not fit each other.
  """

  def __init__(
    self, values: np.ndarray, starts: np.ndarray, columns: np.ndarray, shape: Any
  ):
    places = _places(values.size, starts, columns, shape)
    if places is None:
      raise TinkerError(
        f"a sparse tensor has the shape {str(shape)[:80]}, {values.size} values, "
        f"{starts.size} row pointers and {columns.size} columns; expected [N, K], "
        "ascending columns below K in each row, and N + 1 pointers from 0 to the "
        "number of values. Check the client"
      )
    self._values, self._places = values, places
    self.shape, self.ndim = tuple(shape), 2

  @property
  def size(self) -> int:
    """Number of values of the whole array."""
    return math.prod(self.shape)

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    out = np.zeros(self.size, self._values.dtype if dtype is None else dtype)
    out[self._places] = self._values
    return out.reshape(self.shape)


def _places(
  count: int, starts: np.ndarray, columns: np.ndarray, shape: Any
) -> np.ndarray | None:
  """Returns the places of the values in the flat array; None if something is wrong."""
  is_shape = isinstance(shape, list) and len(shape) == 2
  if not (is_shape and all(type(n) is int and 0 <= n < 2**31 for n in shape)):
    return None
  lengths = np.diff(starts)
  if starts.size != shape[0] + 1 or starts[0] != 0 or (lengths < 0).any():
    return None
  is_inside = ((columns >= 0) & (columns < shape[1])).all()
  if not (starts[-1] == count == columns.size and is_inside):
    return None
  places = np.repeat(np.arange(shape[0]), lengths) * shape[1] + columns
  return places if (np.diff(places) > 0).all() else None
