"""Packing: several examples in one row, first-fit."""

from __future__ import annotations

from collections.abc import Mapping

import grain
import numpy as np

from tunix.data.rows import Row

# Number of rows that are open at a time. An example goes into the first open row with
# enough room. More open rows waste fewer tokens, but a restored iterator must refill up
# to 32 rows. The number is a constant, because the content of rows must not depend on
# the batch size.
OPEN_ROWS = 32


def pack(
  dataset: grain.IterDataset,
  *,
  max_length: int,
  pad_id: int,
  seed: int = 0,
  shuffle: bool = False,
) -> grain.IterDataset:
  """Packs examples first-fit into rows; no example is cut or dropped.

  Args:
    dataset: elements of `OneRow`, each of at most `max_length` tokens.
    max_length: tokens of a row.
    pad_id: token id of padding.
    seed: seed of the shuffle.
    shuffle: if True, the 32 rows that were open together come out in random order.
      First-fit fills the first open row best. Without a shuffle, every 32 rows would
      begin with full rows and end with less full ones.
  """
  lengths = {"input_tokens": max_length, "input_mask": max_length}
  packed = grain.experimental.FirstFitPackIterDataset(
    dataset,
    length_struct=lengths,
    num_packing_bins=OPEN_ROWS,
    seed=seed,
    shuffle_bins=shuffle,
    padding_struct={"input_tokens": pad_id, "input_mask": 0},
  )
  return packed.map(_rename)


def _rename(packed: Mapping[str, np.ndarray]) -> Row:
  """Renames the columns that Grain adds.

  Segment ids count the examples of a row from 1 (0 is padding), and positions count the
  tokens of an example from 0.
  """
  return {
    "input_tokens": packed["input_tokens"],
    "input_mask": packed["input_mask"],
    "positions": packed["input_tokens_positions"],
    "segment_ids": packed["input_tokens_segment_ids"],
  }
