"""Batches of prompts, and their rows as the student and as the teacher read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tunix.data import rows as rows_lib
from tunix.distillation.alignment import Reading, last_of_span
from tunix.ops.reductions import span_sums

# Fields of a batch for the teacher: for each position of the student's row that of the
# teacher's, the number of the row's teacher, and whether it is the one that scores.
PLACES, TEACHER, OWN = "places", "teacher_number", "own"
# For each position of the teacher's row the last position of its span, see `spanned`.
SPAN_ENDS = "span_ends"


class Prompts(NamedTuple):
  """A batch of prompts in the layout of `data.rows.columns`; completions are optional.

  Attributes:
    prompt_ids, prompt_mask: int32 [B, P], padded on the left.
    completion_ids, completion_mask: int32 [B, C], padded on the right, or None.
    teacher_prompt_ids, teacher_prompt_mask: int32 [B, Q], padded on the left: what the
      teacher reads in place of the prompt; or None.
    teacher: int32 [B], number of the row's teacher, see `Teachers`; or None.
    images: images of the prompts by row, the argument of the model's call; or None.
  """

  prompt_ids: np.ndarray
  prompt_mask: np.ndarray
  completion_ids: np.ndarray | None = None
  completion_mask: np.ndarray | None = None
  teacher_prompt_ids: np.ndarray | None = None
  teacher_prompt_mask: np.ndarray | None = None
  teacher: np.ndarray | None = None
  images: Any = None


def joined(batch: Prompts) -> dict[str, Any]:
  """Returns the tokens of each row without gaps; the completion is trained.

  Prompts are padded on the left and completions on the right. A stable sort by padding
  moves the tokens of both to the front of the row and keeps their order.
  """
  assert batch.completion_ids is not None and batch.completion_mask is not None
  mask = np.concatenate([batch.prompt_mask, batch.completion_mask], axis=1)
  ids = mask * np.concatenate([batch.prompt_ids, batch.completion_ids], axis=1)
  trained = mask.copy()
  trained[:, : batch.prompt_ids.shape[1]] = 0
  tokens_first = np.argsort(mask == 0, axis=1, kind="stable")

  def move(x):
    return np.take_along_axis(x, tokens_first, axis=1)

  rows = {"input_tokens": move(ids), "input_mask": move(trained)}
  return rows if batch.images is None else rows | {"images": batch.images}


def seen_by_teacher(batch: Prompts) -> dict[str, Any] | None:
  """Returns the teacher's rows if they are not all that the student reads, else None.

  The fields are those of `joined`, with TEACHER if rows have teachers of their own, and
  PLACES, int32 [B, T], if their prompts are others.
  """
  own, mask = batch.teacher_prompt_ids, batch.teacher_prompt_mask
  if own is None and batch.teacher is None:
    return None
  rows = joined(batch)
  if own is not None and mask is not None:
    width = rows["input_tokens"].shape[1]
    rows = joined(batch._replace(prompt_ids=own, prompt_mask=mask))
    # A completion begins at another place than in the student's row.
    shift = (mask.sum(1) - batch.prompt_mask.sum(1))[:, None]
    last = rows["input_tokens"].shape[1] - 1
    rows[PLACES] = np.clip(np.arange(width) + shift, 0, last).astype(np.int32)
  return rows if batch.teacher is None else rows | {TEACHER: batch.teacher}


def spanned(
  batch: Prompts, readings: Sequence[Reading], length: int
) -> tuple[dict[str, Any], dict[str, Any], np.ndarray]:
  """Returns the rows of student and teacher, aligned by spans of text.

  Args:
    batch: prompts, those of the teacher too, and completions.
    readings: the completion of each row in the tokens of the teacher.
    length: tokens of a completion that the teacher reads.

  Returns:
    The fields of `joined`, which train only spans that the teacher reads whole; the
    teacher's rows, with PLACES, OWN (the last position of each span) and SPAN_ENDS; and
    int32 [B, T], for each position the last one of its span. The position of a token
    is that of its label, one before it.
  """
  ids = [reading.ids[:length] for reading in readings]
  marks = [np.ones_like(row) for row in ids]
  tokens, mask = rows_lib.stack_completions(ids, marks, length, pad_id=0)
  own: Any = (batch.teacher_prompt_ids, batch.teacher_prompt_mask)
  rows, seen = joined(batch), joined(Prompts(own[0], own[1], tokens, mask))
  ends, seen_ends = (
    np.tile(np.arange(mask.shape[1], dtype=np.int32), (len(mask), 1))
    for mask in (rows["input_mask"], seen["input_mask"])
  )
  places = np.zeros_like(ends)
  starts = batch.prompt_mask.sum(1), own[1].sum(1)
  for row, (reading, start, other) in enumerate(zip(readings, *starts)):
    numbers = reading.student_spans
    theirs, cut = np.split(reading.teacher_spans, [length])
    part = np.arange(start - 1, start - 1 + len(numbers))
    their_part = np.arange(other - 1, other - 1 + len(theirs))
    rows["input_mask"][row, part + 1] *= np.isin(numbers, np.setdiff1d(theirs, cut))
    ends[row, part] = start - 1 + last_of_span(numbers)
    seen_ends[row, their_part] = other - 1 + last_of_span(theirs)
    last = other - 1 + np.searchsorted(theirs, numbers, side="right") - 1
    places[row, part] = np.maximum(last, 0)
  fields = {PLACES: places, OWN: ends == np.arange(ends.shape[1]), SPAN_ENDS: seen_ends}
  return rows, seen | fields, ends


def selected(
  x: jax.Array,
  places: jax.Array | None = None,
  own: jax.Array | None = None,
  span_ends: jax.Array | None = None,
) -> jax.Array:
  """Returns the teacher's output [B, S, ...] at the student's positions.

  Args:
    x: output of the teacher at each position of its rows.
    places: int32 [B, T], see PLACES; None keeps the positions.
    own: bool [B], or [B, T]; other rows or positions become 0, so that the outputs of
      all teachers add up.
    span_ends: int32 [B, S], see SPAN_ENDS; the values of a span are added first.
  """

  def wide(index):
    return index.reshape(index.shape + (1,) * (x.ndim - index.ndim))

  if span_ends is not None:
    x = span_sums(x, span_ends)
  if places is not None:
    x = jnp.take_along_axis(x, wide(places), axis=1)
  return x if own is None else jnp.where(wide(own), x, jnp.zeros_like(x))
