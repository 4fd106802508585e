"""The causal and windowed mask of splash attention, with a fast test of whole blocks.

The tables of the kernel are computed on the host from every block of the mask. With
whole blocks this takes T * T operations: 90 seconds of tracing for 131,072 tokens. Here
a block whose entries are all equal is returned as one number. Importing this file
imports Pallas.
"""

from __future__ import annotations

import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as lib


class ReachMask(lib.LocalMask):
  """The mask of queries that attend to their slot and the `window - 1` before it."""

  def __init__(self, slots: np.ndarray, keys: int, window: int | None):
    """Makes the mask.

    Args:
      slots: slots of the queries, int32 [T], in any order.
      keys: number of keys S.
      window: number of keys that a query attends to; None for all keys up to its slot.
    """
    self._before = keys if window is None else window - 1
    before = None if window is None else window - 1
    super().__init__((slots.size, keys), window_size=(before, 0), offset=0)
    self.q_sequence = slots

  def __getitem__(self, idx: tuple[slice, slice]) -> np.ndarray:
    """Returns a block, bool [t, s], or [1, 1] for a block of equal entries."""
    queries, keys = self.q_sequence[idx[0]], idx[1]
    low, high = queries.min(), queries.max()
    # All entries are False: all keys come after every query, or before every window.
    if high < keys.start or low - self._before >= keys.stop:
      return np.zeros((1, 1), np.bool_)
    # All entries are True: no key comes after the first query, and all keys are inside
    # the window of the last query.
    if low >= keys.stop - 1 and high - self._before <= keys.start:
      return np.ones((1, 1), np.bool_)
    return super().__getitem__(idx)
