"""Several examples in a row, first-fit."""

from __future__ import annotations

from collections.abc import Mapping

import grain
import numpy as np

from tunix.data.rows import Row

# Rows that are filled at the same time. More of them waste less (an example goes into
# the first row with room); it is a constant because the content of rows must not
# change with the batch size. A restored iterator refills at most so many rows.
OPEN_ROWS = 32


def pack(
  dataset: grain.IterDataset,
  *,
  max_length: int,
  pad_id: int,
  seed: int = 0,
  shuffle: bool = False,
) -> grain.IterDataset:
  """Packs elements first-fit into rows; no example is cut or left out.

  Args:
    dataset: elements of `OneRow`, none longer than `max_length`.
    max_length: tokens a row.
    pad_id: token id of padding.
    seed: of the shuffle.
    shuffle: shuffle the rows that were filled together. First-fit fills the first
      rows best, so without it fullness goes up and down in the order of training.
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
  return {
    "input_tokens": packed["input_tokens"],
    "input_mask": packed["input_mask"],
    "positions": packed["input_tokens_positions"],
    "segment_ids": packed["input_tokens_segment_ids"],
  }
