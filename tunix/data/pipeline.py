"""Batches of records: shuffle, repeat, render, pack or pad, stack.

The pipeline consists of Grain datasets. The state of an iterator is a small JSON
object, and an iterator restored from it continues with the same batches. Tokens are not
cached: memory holds only the examples that are rendered ahead.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import grain

from tunix.data import rows
from tunix.data.batching import buckets, draws, packing as packing_lib, streams
from tunix.data.images import ImageReader
from tunix.data.reading.stream import Streamed
from tunix.data.records import PAIRS, SFT
from tunix.data.rows import OneRow, Overlong, SideBySide
from tunix.data.source import Source
from tunix.data.turns.reasoning import Reasoning
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.utils import checks

# Number of examples that threads render ahead. 64 are a few batches and take a few MB.
_PREFETCHED_EXAMPLES = 64
# Images of an example may take 50 MB.
_PREFETCHED_IMAGES = 4


def build_dataset(
  records: Sequence[Mapping[str, Any]] | Streamed,
  tokenizer: TokenizerAdapter,
  *,
  batch_size: int,
  max_length: int,
  overlong: Overlong = "error",
  chat: bool | None = None,
  template_kwargs: Mapping[str, Any] | None = None,
  reasoning: Reasoning = "error",
  images: ImageReader | None = None,
  image_tokens: int | None = None,
  **options: Any,
) -> grain.IterDataset:
  """Returns batches of rows, int32 [batch_size / process_count, max_length].

  Every batch is a dict of `input_tokens`, `input_mask` (1 on trained tokens),
  `positions` and `segment_ids` (0 on padding).

  Args:
    records: dicts as described in `tunix.data.records`: a sequence in memory,
      `Records` (a file, a `tunix.data.reading.mixture.Mixture`), or a stream
      (`tunix.data.reading.stream.Streamed`).
    tokenizer: tokenizer with the chat template.
    batch_size: number of rows of a batch over all processes.
    max_length: tokens of a row.
    overlong: treatment of examples longer than `max_length`: "error" raises during the
      iteration, "truncate" cuts, "drop" leaves them out.
    chat: True treats plain-text prompts as user turns of a chat. None does so if the
      tokenizer has a chat template.
    template_kwargs: further variables of the chat template.
    reasoning: see `Source`.
    images: reads the images of the records; batches then have the field `images`.
    image_tokens: see `Source`; a smaller number saves memory and time.
    **options: further arguments of `build_batches`: packing, length_buckets, widths,
      batches_per_step, shuffle, seed, num_epochs, process_index, process_count,
      num_threads.

  Raises:
    ValueError: an argument is out of range. The iteration raises ValueError for records
      that cannot be trained on, and names their place.
  """
  source = Source(
    records=records,
    kind=SFT,
    tokenizer=tokenizer,
    layout=OneRow(max_length=max_length),
    overlong=overlong,
    chat=chat,
    template_kwargs=template_kwargs,
    reasoning=reasoning,
    images=images,
    image_tokens=image_tokens,
  )
  return build_batches(source, batch_size=batch_size, **options)


def build_batches(
  source: Source,
  *,
  batch_size: int,
  packing: bool = False,
  length_buckets: Sequence[int] = (),
  widths: Sequence[int] = (),
  shared_rows: int | None = None,
  batches_per_step: int = 1,
  shuffle: bool = True,
  seed: int = 0,
  num_epochs: int | None = 1,
  process_index: int = 0,
  process_count: int = 1,
  num_threads: int = 1,
) -> grain.IterDataset:
  """Returns batches of `batch_size / process_count` rows of any kind of record.

  Every batch is a dict of arrays; the layout of the source names and stacks them. If
  the last batch is smaller, rows of padding fill it. Iterators have `get_state()` and
  `set_state()`.

  Every process reads the same stream and takes its rows of each batch. The batches
  therefore do not depend on the number of processes, and all processes receive the same
  number of batches.

  Args:
    source: records and their settings.
    batch_size: number of rows of a batch over all processes.
    packing: if True, a row holds several examples. Only for the layout `OneRow`.
    length_buckets: row lengths below `max_length`, see `tunix.data.batching.buckets`.
      With (), every row has `max_length` tokens. Only for the layout `OneRow`.
    widths: row lengths below `max_length`, see `tunix.data.widths`. The batches of a
      step get the smallest of these, or `max_length`, that holds their longest record.
      Order and records stay. With (), every row has `max_length` tokens. Only for the
      layout `OneRow`, without packing and length_buckets; or for pairs with
      shared_rows.
    shared_rows: rows of a batch over all processes, which its records share; a record
      attends only to itself. With widths, which may then be longer than `max_length`.
      None: each record has a row. The rows of pairs hold sequences, each of them a
      prompt with a completion (`buckets.batch_pairs`).
    batches_per_step: consecutive batches that share a width: the micro-batches of an
      optimizer step.
    shuffle: if True, every epoch has a new order, determined by `seed`; a stream has
      one within its `shuffle_buffer`.
    seed: 0 to 2**32 - 1.
    num_epochs: number of passes over the records; None never ends.
    process_index: index of this process, from 0.
    process_count: number of processes that share each batch.
    num_threads: number of threads that render ahead, one at most for a stream; 0
      renders in the thread of the caller. Above 1 the tokenizer must be thread-safe
      (`tokenizers` is). The batches do not depend on it.

  Raises:
    ValueError: an argument is out of range. The iteration raises ValueError for records
      that cannot be trained on, and names their place.
  """
  ways = {"length_buckets": length_buckets, "packing": packing, "widths": widths}
  names = [name for name, value in ways.items() if value]
  shares_pairs = (
    source.kind is PAIRS and names == ["widths"] and shared_rows is not None
  )
  if names and not isinstance(source.layout, OneRow) and not shares_pairs:
    raise ValueError(
      f"{names[0]} {'is' if names[0] == 'packing' else 'are'} set; expected only for "
      "fine-tuning records (layout OneRow). Leave it out"
    )
  if len(names) > 1:
    raise ValueError(
      f"{names[0]} and {names[1]} are both set; expected one of them, because each "
      "decides the lengths of rows. Leave one of them out"
    )
  if source.has_images:
    check_image_rows(
      packing=packing, length_buckets=list(length_buckets), shared_rows=shared_rows
    )
  if shared_rows is not None and not widths:
    raise ValueError(
      f"shared_rows is {shared_rows} and widths is empty; expected the widths of "
      "shared rows. Give both, as tunix.data.widths.share chooses them, or neither"
    )
  stream = _elements(
    source, shuffle=shuffle, seed=seed, num_epochs=num_epochs, num_threads=num_threads
  )
  part = _part(batch_size, process_index, process_count)
  if isinstance(source.layout, OneRow):
    lengths = {"max_length": source.layout.max_length, "pad_id": source.pad_id}
    if length_buckets:
      return buckets.batch(stream, length_buckets, batch_size, **lengths, **part)
    if widths:
      sizes = batch_size, batches_per_step
      if shared_rows is not None:
        part = _part(shared_rows, process_index, process_count)
      return buckets.batch_steps(
        stream, widths, *sizes, **lengths, **part, shared_rows=shared_rows
      )
    if packing:
      stream = packing_lib.pack(stream, **lengths, seed=seed, shuffle=shuffle)
    else:
      stream = stream.map(functools.partial(rows.pad_row, **lengths))
  elif isinstance(source.layout, SideBySide) and shared_rows is not None:
    own = slice(part["first"], part["first"] + part["count"])
    return buckets.batch_pairs(
      stream,
      widths,
      batch_size,
      batches_per_step,
      layout=source.layout,
      pad_id=source.pad_id,
      **_part(shared_rows, process_index, process_count),
      shared_rows=shared_rows,
      own=own,
    )
  stack = functools.partial(source.stack, **part)
  return stream.batch(batch_size, drop_remainder=False, batch_fn=stack)


def check_image_rows(**settings: object) -> None:
  """Refuses settings that put records with images into one row, or change their order.

  Args:
    **settings: values by name; those that are false are accepted.

  Raises:
    ValueError: names the setting.
  """
  for name, value in settings.items():
    if value:
      raise ValueError(
        f"{name} is {value!r} and the records have images; expected one record in each "
        "row, in the order of the data. Leave it out"
      )


def _elements(
  source: Source,
  *,
  shuffle: bool,
  seed: int,
  num_epochs: int | None,
  num_threads: int,
) -> grain.IterDataset:
  """Returns the elements of all epochs in the order of training."""
  checks.number("seed", seed, checks.SEED, whole=True)
  checks.number("num_epochs", num_epochs, checks.COUNT, whole=True, optional=True)
  checks.number("num_threads", num_threads, checks.NOT_NEGATIVE, whole=True)
  ahead = _PREFETCHED_IMAGES if source.has_images else _PREFETCHED_EXAMPLES
  if isinstance(source.records, Streamed):
    order = {"shuffle": shuffle, "seed": seed, "num_epochs": num_epochs}
    rendered = streams.draws(source.records, **order).map(source.element)
    kept = rendered.filter(lambda element: element is not None)
    if not num_threads:
      return kept
    return grain.experimental.ThreadPrefetchIterDataset(
      kept, prefetch_buffer_size=ahead
    )
  order = draws.draws(source.records, shuffle=shuffle, seed=seed, num_epochs=num_epochs)
  # If at least one of the n records is kept, two epochs in different orders drop at
  # most 2 n - 2 records in a row: n - 1 at the end of one epoch and n - 1 at the start
  # of the next. `patience` is one more (n with a single epoch), so reaching it proves
  # that every record is dropped. Without this limit, an endless data set of dropped
  # records would search forever, and a finite one would end without any batch.
  patience = len(source) if num_epochs == 1 else 2 * len(source) - 1
  return order.map(_Render(source, patience)).to_iter_dataset(
    grain.ReadOptions(
      num_threads=num_threads,
      prefetch_buffer_size=ahead if num_threads else 0,
    )
  )


def _part(batch_size: int, process_index: int, process_count: int) -> dict[str, int]:
  """Returns the rows of every batch that this process takes: {"first", "count"}."""
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
  """Maps a record number to an element, or to None, which Grain skips.

  Args:
    source: renders the records.
    patience: number of dropped records in a row that raises ValueError.
  """

  def __init__(self, source: Source, patience: int):
    self._source = source
    self._patience = patience
    self._dropped_in_a_row = 0
    self._lock = threading.Lock()

  def __call__(self, index: int) -> Any:
    element = self._source.element(index)
    # Several threads of Grain call this object at the same time.
    with self._lock:
      self._dropped_in_a_row = self._dropped_in_a_row + 1 if element is None else 0
      if self._dropped_in_a_row >= self._patience:
        raise ValueError(self._source.none_left())
    return element


# Old name of `build_batches` for preference records, kept for existing callers.
build_answers = build_batches
