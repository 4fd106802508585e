"""Splash attention's causal and windowed mask, quick to cut into blocks.

The kernel's tables are made on the host from every block of the mask, which is work of
T * T: 90 seconds of tracing for 131,072 tokens. Of a block that is open or closed
altogether one number says as much. (Importing this file imports Pallas.)
"""

from __future__ import annotations

import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as lib


class ReachMask(lib.LocalMask):
  """A query sees its own slot and the `window - 1` before it; None: all before it."""

  def __init__(self, slots: np.ndarray, keys: int, window: int | None):
    """Args:
    slots: int32 [T], of the queries, in any order.
    keys: S.
    window: see above.
    """
    self._before = keys if window is None else window - 1
    before = None if window is None else window - 1
    super().__init__((slots.size, keys), window_size=(before, 0), offset=0)
    self.q_sequence = slots

  def __getitem__(self, idx: tuple[slice, slice]) -> np.ndarray:
    """bool [t, s]; [1, 1] where all of it is alike."""
    queries, keys = self.q_sequence[idx[0]], idx[1]
    low, high = queries.min(), queries.max()
    if high < keys.start or low - self._before >= keys.stop:
      return np.zeros((1, 1), np.bool_)
    if low >= keys.stop - 1 and high - self._before <= keys.start:
      return np.ones((1, 1), np.bool_)
    return super().__getitem__(idx)
