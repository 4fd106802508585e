"""Examples laid into rows of a fixed length: one a row, or several packed.

Both forms give the same fields, all int32 [max_length]:

  input_tokens   token ids, the padding id behind them
  input_mask     1 on trained tokens
  positions      0, 1, 2, ... from the start of each segment
  segment_ids    1, 2, ... by example within the row; 0 is padding
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import grain
import numpy as np

from tunix.data.examples import Example

Row = dict[str, np.ndarray]

FIELDS = ("input_tokens", "input_mask", "positions", "segment_ids")

# Rows that are filled at the same time. More of them waste less (an example goes into
# the first row with room); it is a constant because the content of rows must not
# change with the batch size. A restored iterator refills at most so many rows.
OPEN_ROWS = 32


def to_element(example: Example) -> Row:
  """The two fields that packing starts from."""
  return {"input_tokens": example.tokens, "input_mask": example.mask}


def pad_row(element: Row, *, max_length: int, pad_id: int) -> Row:
  """One example as a row of its own."""
  length = len(element["input_tokens"])
  row = empty_row(max_length, pad_id)
  row["input_tokens"][:length] = element["input_tokens"]
  row["input_mask"][:length] = element["input_mask"]
  row["positions"][:length] = np.arange(length)
  row["segment_ids"][:length] = 1
  return row


def empty_row(max_length: int, pad_id: int) -> Row:
  """A row of padding alone."""
  row = {name: np.zeros(max_length, np.int32) for name in FIELDS}
  row["input_tokens"][:] = pad_id
  return row


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
    dataset: elements as `to_element` makes them, none longer than `max_length`.
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


def stack_rows(
  rows: Sequence[Row], *, first: int, count: int, max_length: int, pad_id: int
) -> Row:
  """Rows `first` to `first + count` as one batch [count, max_length].

  Rows that are not there (a last, smaller batch) become padding, so that every batch
  has the same shape.
  """
  own = list(rows[first : first + count])
  own += [empty_row(max_length, pad_id)] * (count - len(own))
  return {name: np.stack([row[name] for row in own]) for name in FIELDS}
