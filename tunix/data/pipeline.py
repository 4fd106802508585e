"""From records to batches: shuffle, repeat, render, pack or pad, batch.

Built from Grain's datasets, so that an iterator's state is a small JSON object that
restores exactly. Nothing tokenised is kept but what is being prefetched.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import grain

from tunix.data import buckets, draws, packing as packing_lib, rows
from tunix.data.records import SFT
from tunix.data.rows import OneRow, Overlong
from tunix.data.source import Source
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.utils import checks

_PREFETCHED_EXAMPLES = 64


def build_dataset(
  records: Sequence[Mapping[str, Any]],
  tokenizer: TokenizerAdapter,
  *,
  batch_size: int,
  max_length: int,
  packing: bool = False,
  length_buckets: Sequence[int] = (),
  shuffle: bool = True,
  seed: int = 0,
  num_epochs: int | None = 1,
  overlong: Overlong = "error",
  process_index: int = 0,
  process_count: int = 1,
  chat: bool | None = None,
  template_kwargs: Mapping[str, Any] | None = None,
  num_threads: int = 1,
) -> grain.IterDataset:
  """Batches of int32 [batch_size / process_count, max_length].

  Every batch is a dict of input_tokens, input_mask (1 on trained tokens), positions
  and segment_ids (0 on padding). A last, smaller batch is filled up with rows of
  padding. Iterators have `get_state()` and `set_state()`.

  Every process walks the same stream and takes its own rows of each batch: batches
  do not depend on the number of processes, and all see equally many.

  Args:
    records: dicts as `tunix.data.records` describes, in memory or `Records` (a file, a
      `tunix.data.mixture.Mixture`).
    tokenizer: encodes text and renders chats.
    batch_size: rows of a batch over all processes.
    max_length: tokens of a row.
    packing: several examples a row.
    length_buckets: shorter lengths of rows, see `tunix.data.buckets`; (): none, every
      row has `max_length`.
    shuffle: a new order each epoch, determined by `seed`.
    seed: 0 to 2**32 - 1.
    num_epochs: passes over the records; None never ends.
    overlong: examples longer than `max_length`: "error" raises when one is met,
      "truncate" cuts, "drop" leaves out.
    process_index: this process.
    process_count: processes that share each batch.
    chat: whether plain prompts are user turns; None when there is a chat template.
    template_kwargs: further names for the chat template.
    num_threads: threads that render ahead; 0 renders in the caller's thread. Above 1
      the tokenizer must be safe to call from many threads (`tokenizers` is). Batches
      do not depend on it.

  Raises:
    ValueError: an argument is out of range. Iteration raises ValueError for records
      that cannot be trained on, naming their place.
  """
  source = Source(
    records=records,
    kind=SFT,
    tokenizer=tokenizer,
    layout=OneRow(max_length=max_length),
    overlong=overlong,
    chat=chat,
    template_kwargs=template_kwargs,
  )
  return build_batches(
    source,
    batch_size=batch_size,
    packing=packing,
    length_buckets=length_buckets,
    shuffle=shuffle,
    seed=seed,
    num_epochs=num_epochs,
    process_index=process_index,
    process_count=process_count,
    num_threads=num_threads,
  )


def build_batches(
  source: Source,
  *,
  batch_size: int,
  packing: bool = False,
  length_buckets: Sequence[int] = (),
  shuffle: bool = True,
  seed: int = 0,
  num_epochs: int | None = 1,
  process_index: int = 0,
  process_count: int = 1,
  num_threads: int = 1,
) -> grain.IterDataset:
  """Batches of `batch_size / process_count` rows of any kind of record.

  Each is a dict as the source's layout stacks it; all else as `build_dataset` has it.

  Raises:
    ValueError: an argument is out of range. Iteration raises ValueError for records
      that cannot be trained on, naming their place.
  """
  stream = _elements(
    source, shuffle=shuffle, seed=seed, num_epochs=num_epochs, num_threads=num_threads
  )
  ours = _ours(batch_size, process_index, process_count)
  if isinstance(source.layout, OneRow):
    lengths = {"max_length": source.layout.max_length, "pad_id": source.pad_id}
    if length_buckets:
      if packing:
        raise ValueError(
          "length_buckets are set and packing too, which fills rows already: leave one "
          "of them out"
        )
      return buckets.batch(stream, length_buckets, batch_size, **lengths, **ours)
    if packing:
      stream = packing_lib.pack(stream, **lengths, seed=seed, shuffle=shuffle)
    else:
      stream = stream.map(functools.partial(rows.pad_row, **lengths))
  elif packing or length_buckets:
    name = "packing is" if packing else "length_buckets are"
    raise ValueError(f"{name} for rows of fine-tuning alone: leave it out")
  stack = functools.partial(source.stack, **ours)
  return stream.batch(batch_size, drop_remainder=False, batch_fn=stack)


def _elements(
  source: Source,
  *,
  shuffle: bool,
  seed: int,
  num_epochs: int | None,
  num_threads: int,
) -> grain.IterDataset:
  """Elements of all epochs, in the order of training."""
  checks.number("seed", seed, checks.SEED, whole=True)
  checks.number("num_epochs", num_epochs, checks.COUNT, whole=True, optional=True)
  checks.number("num_threads", num_threads, checks.NOT_NEGATIVE, whole=True)
  order = draws.draws(source.records, shuffle=shuffle, seed=seed, num_epochs=num_epochs)
  # So many drops in a row are a whole epoch of them: without a limit, an endless data
  # set would look for an example forever and a finite one would end in silence.
  patience = len(source) if num_epochs == 1 else 2 * len(source) - 1
  return order.map(_Render(source, patience)).to_iter_dataset(
    grain.ReadOptions(
      num_threads=num_threads,
      prefetch_buffer_size=_PREFETCHED_EXAMPLES if num_threads else 0,
    )
  )


def _ours(batch_size: int, process_index: int, process_count: int) -> dict[str, int]:
  """Which rows of every batch are this process's: {"first", "count"}."""
  if process_count < 1 or not 0 <= process_index < process_count:
    raise ValueError(
      f"process_index {process_index} of process_count {process_count} is out of range"
    )
  checks.number("batch_size", batch_size, checks.COUNT, whole=True)
  if batch_size % process_count:
    raise ValueError(
      f"batch_size {batch_size} must be a positive multiple of the {process_count} "
      "processes that share each batch"
    )
  count = batch_size // process_count
  return {"first": process_index * count, "count": count}


class _Render:
  """Index of a record -> element, or None (which Grain skips) when it is dropped."""

  def __init__(self, source: Source, patience: int):
    self._source = source
    self._patience = patience
    self._dropped_in_a_row = 0
    self._lock = threading.Lock()

  def __call__(self, index: int) -> Any:
    element = self._source.element(index)
    with self._lock:
      self._dropped_in_a_row = self._dropped_in_a_row + 1 if element is None else 0
      if self._dropped_in_a_row >= self._patience:
        raise ValueError(self._source.none_left())
    return element


# The name that it had for batches of preferences.
build_answers = build_batches
